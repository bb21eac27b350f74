"""Self-verification: a policy learns to grade its own answers, and what that does to its answers.

Source: "Learning to Self-Verify Makes Language Models Better Reasoners" (arXiv 2602.07594) and its
code. The picture's three parts, in order:

(a) On-policy collection: `collect_items` labels the policy's own answers by the rule verifier.
(b) Post-processing: `filter_queries`, `diversify` and `balance` make of many answers few items, as
    often right as wrong, of many queries. `post_process` chains them.
(c) Self-verification: the policy grades (question, answer), a group of verdicts an item, and
    `VerificationReward` compares each with the label. `SelfVerification` gives `train` the batches,
    as one of five `STRATEGIES` says.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_kit.config import GRPOConfig
from grpo_kit.generation import reply
from grpo_kit.models import Policy
from grpo_kit.rewards import (
    VerificationReward,
    accuracy_reward,
    completion_text,
    extract_answer,
    parse_verdict,
    question_text,
    verdict_stats,
)
from grpo_kit.rewards.judge.texts import fenced
from grpo_kit.tasks import Task
from grpo_kit.training import Batch, Cursor, PromptCollector, check_columns, collect, reward_name

logger = logging.getLogger(__name__)


def verify_prompt(question: str, answer: str) -> str:
    """Ask for a graded analysis of a proposed final answer (not of its reasoning)."""
    return f"{question}\nProposed answer: {answer}\nIs it correct? Check, then answer Yes or No."


# --- (a) collection -------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerificationItem:
    """One answer to one query, with its label: is it correct?"""

    query_id: Hashable
    question: str
    answer: str
    correct: bool


def collect_items(
    prompts: Sequence[str | list[dict]],
    completions: Sequence[str | list[dict]],
    rewards: Sequence[float | None],
    *,
    answer_of: Callable[[str], str | None] = extract_answer,
) -> list[VerificationItem]:
    """Label N completions: one item for each that has an answer.

    Args:
        prompts, completions: as rewards get them. A query is its last message of the user, by which
            it is known and to which the answer is shown.
        rewards: what the rule verifier, `accuracy_reward`, says of each: 1 is correct. Where it is
            None, for want of a reference, there is no label and so no item.
        answer_of: what is to be graded of a completion's text; None discards it. By default the
            extracted answer, without its reasoning; `str` takes all of it.

    Raises ValueError where the three differ in length.
    """
    if not len(prompts) == len(completions) == len(rewards):
        raise ValueError(
            f"there are {len(prompts)} prompts, {len(completions)} completions and {len(rewards)} "
            "rewards; give one of each for every answer."
        )
    items = []
    for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
        answer = answer_of(completion_text(completion))
        if answer and reward is not None:
            question = question_text(prompt)
            items.append(VerificationItem(question, question, answer, reward == 1))
    return items


# --- (b) post-processing --------------------------------------------------------------------------


def _by_query(items: Sequence[VerificationItem]) -> dict[Hashable, list[VerificationItem]]:
    queries = defaultdict(list)
    for item in items:
        queries[item.query_id].append(item)
    return queries


def filter_queries(items: Sequence[VerificationItem], seed: int = 0) -> list[VerificationItem]:
    """Drop queries whose answers are all wrong, and all but one of those that are all right.

    A query that is always answered wrong has nothing to tell wrong answers from; of one that is
    always answered right a single item is kept, which `diversify` takes as filler.
    """
    rng = random.Random(f"filter-{seed}")
    kept: list[VerificationItem] = []
    for own in _by_query(items).values():
        labels = {item.correct for item in own}
        if labels == {True}:
            kept.append(rng.choice(own))
        elif labels == {True, False}:
            kept += own
    return kept


def diversify(
    items: Sequence[VerificationItem], seed: int = 0
) -> tuple[list[VerificationItem], list[VerificationItem]]:
    """Take one right and one wrong answer of each mixed query: many queries, few items of each.

    Returns them, and the filler: at most one more of each label from a mixed query, and one item
    of a query that has one label only.
    """
    rng = random.Random(f"diversify-{seed}")
    chosen: list[VerificationItem] = []
    filler: list[VerificationItem] = []
    for own in _by_query(items).values():
        by_label = [[item for item in own if item.correct is label] for label in (True, False)]
        if all(by_label):
            for of_label in by_label:
                first, *second = rng.sample(of_label, min(2, len(of_label)))
                chosen.append(first)
                filler += second
        else:
            filler.append(rng.choice(own))
    return chosen, filler


def balance(
    chosen: Sequence[VerificationItem], filler: Sequence[VerificationItem], n: int, seed: int = 0
) -> list[VerificationItem]:
    """Shuffle together n // 2 right and n // 2 wrong items.

    Each half is drawn from `chosen`, and what is missing from `filler`, first without, then with
    replacement (where there is no filler of a label, from `chosen` again). Where there is no item
    of one label at all, the result is empty: items of the other alone would teach one constant
    verdict.
    """
    rng = random.Random(f"balance-{seed}")
    half = n // 2
    result: list[VerificationItem] = []
    for label in (True, False):
        own, spare = (
            rng.sample(of_label, len(of_label))
            for of_label in ([i for i in pool if i.correct is label] for pool in (chosen, filler))
        )
        pool = own + spare
        if not pool:
            return []
        result += pool[:half] + rng.choices(spare or own, k=max(0, half - len(pool)))
    rng.shuffle(result)
    return result


def post_process(
    items: Sequence[VerificationItem], seed: int, n: int | None = None
) -> list[VerificationItem]:
    """`filter_queries`, `diversify`, `balance`: items to learn verification from.

    As many items as there are queries in `items`, or `n` if that is less, rounded down to an even
    number. The same for the same items and seed. Empty where there are no right or no wrong items
    left, or fewer than two queries.
    """
    queries = len(_by_query(items))
    n = queries if n is None else min(n, queries)
    chosen, filler = diversify(filter_queries(items, seed), seed)
    return balance(chosen, filler, n, seed)


# --- (c) self-verification ------------------------------------------------------------------------


def verification_prompt(item: VerificationItem) -> list[dict]:
    """Ask for a graded analysis of the item's answer, which ends with Yes or No.

    Role marks in the answer, which the policy wrote, are broken.
    """
    return [{"role": "user", "content": verify_prompt(item.question, fenced(item.answer))}]


GENERATION, VERIFICATION = "generation", "verification"
INIT_SHARE = 0.4  # of the run that Verify-Init spends on verification: 400 of 1,000 steps
ALTER_EVERY = 5  # steps
# What the updates of a step learn from, by step (from 0) and progress (0..1).
_POST_PROCESS = post_process
STRATEGIES: dict[str, Callable[[int, float], list[tuple[str, ...]]]] = {
    "generate": lambda step, progress: [(GENERATION,)],
    "self-verify": lambda step, progress: [(VERIFICATION,)],
    "mixed": lambda step, progress: [(GENERATION, VERIFICATION)],
    "verify-init": lambda step, progress: [
        (VERIFICATION,) if progress < INIT_SHARE else (GENERATION,)
    ],
    "verify-alter": lambda step, progress: (
        [(GENERATION,), (VERIFICATION,)] if step % ALTER_EVERY == ALTER_EVERY - 1
        else [(GENERATION,)]
    ),
}  # fmt: skip


class SelfVerification:
    """A collector for `train`: batches of answers and of verdicts on them, as the strategy says.

    Every step samples answers to the next prompts, also where only verdicts are learnt from, and
    puts their items into a buffer. A step that learns verification post-processes the buffer to at
    most as many items as a batch has groups, samples a group of verdicts on each (after the update
    on the answers, where there is one before), and empties it. Items that are too long for the
    model are left out. An update on both (`mixed`) has half a batch of answers and half of
    verdicts. Where the buffer yields no items, since one label is missing, the step goes without,
    and the buffer is kept.

    Strategies: `generate` (the baseline), `self-verify` (verdicts only), `mixed`, `verify-init`
    (verdicts for 40 % of the run, then answers), `verify-alter` (answers, and after every fifth
    step a batch of verdicts). They cost unlike numbers of tokens a step: compare them with
    `max_generated_tokens`, which progress then goes by.

    Logged: what a batch of prompts logs, of the answers; the same of the verdicts as
    `verification/…`, with `yes_rate`, `false_yes`, `false_no`, `unparsed`; and how many items there
    were, `verification/collected` in the buffer, `verification/items` of them used, and
    `verification/too_long` left out.

    Args:
        prompts: the task's prompts; its rewards are those of answers.
        strategy: one of `STRATEGIES`, or a function like them.
        reward: of verdicts; has the columns `correct` and `pass_rate`.
        post_process: like the function of this name.
        verifier: the rule that labels answers, a reward; 1 is correct.
        answer_of: see `collect_items`.
        prompt: the messages that ask for a verdict on an item.

    Raises ValueError for an unknown strategy, rewards that need other columns than there are, and a
    batch with less than two groups for verdicts, of which nothing could be balanced.
    """

    def __init__(
        self,
        prompts: PromptCollector,
        strategy: str | Callable[[int, float], list[tuple[str, ...]]] = "verify-alter",
        *,
        reward: Callable | None = None,
        post_process: Callable[..., list[VerificationItem]] = post_process,
        verifier: Callable = accuracy_reward,
        answer_of: Callable[[str], str | None] = extract_answer,
        prompt: Callable[[VerificationItem], list[dict]] = verification_prompt,
    ):
        if isinstance(strategy, str) and strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}.")
        self.prompts = prompts
        self.schedule = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
        self.reward = VerificationReward() if reward is None else reward
        check_columns(verifier, prompts.task.train.column_names, f"task {prompts.task.name!r}")
        check_columns(self.reward, ["correct", "pass_rate"], "a verification item")
        own = [f for f in (strategy, post_process) if callable(f) and f is not _POST_PROCESS]
        named = [strategy] if isinstance(strategy, str) else []
        self.name = " ".join(["self-verification", *named, *(reward_name(f) for f in own)])
        self.verifier = verifier
        self.post_process = post_process
        self.answer_of = answer_of
        self.prompt = prompt
        config = prompts.config
        self.groups = config.generation_batch_size // config.num_generations
        kinds = [
            kinds
            for step in range(2 * ALTER_EVERY)
            for progress in (0.0, 1.0)
            for kinds in self.schedule(step, progress)
            if VERIFICATION in kinds
        ]
        if kinds and self.groups // max(map(len, kinds)) < 2:
            raise ValueError(
                f"generation_batch_size is {config.generation_batch_size}, {self.groups} group(s) "
                f"of {config.num_generations}: too few for one right and one wrong item of verdicts"
                f"; take {2 * max(map(len, kinds)) * config.num_generations} or more."
            )
        # a schedule that comes to no verification for long must not collect without end
        self.buffer: deque[VerificationItem] = deque(
            maxlen=2 * ALTER_EVERY * config.generation_batch_size
        )

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        updates = self.schedule(state.global_step, state.progress)
        size = max(1, self.groups // max(len(kinds) for kinds in updates))  # groups of each kind
        answers = self.prompts.batch(generator, state, **self._one_update(size))
        self.buffer.extend(self._items(answers))
        metrics |= answers.metrics() | {"generated_tokens": answers.generated_tokens}
        for kinds in updates:
            parts = [answers] if GENERATION in kinds else []
            if VERIFICATION in kinds:
                parts += self._verdicts(size, generator, state, metrics)
            if parts:
                yield parts[0] if len(parts) == 1 else Batch.concatenate(parts)

    def _one_update(self, groups: int) -> dict[str, int | None]:
        """The changes to the config for a batch of `groups`, however it is then cut."""
        return {
            "generation_batch_size": groups * self.prompts.config.num_generations,
            "per_device_train_batch_size": None,
            "gradient_accumulation_steps": 1,
        }

    def _items(self, batch: Batch) -> list[VerificationItem]:
        texts = self.prompts.policy.decode(batch.rollouts.completion_lists())
        return _labelled(batch.examples, texts, self.verifier, self.answer_of)

    def _verdicts(
        self, size: int, generator: torch.Generator, state: Any, metrics: dict
    ) -> list[Batch]:
        """A batch of verdicts on what is in the buffer; none where that yields no items."""
        policy, config = self.prompts.policy, self.prompts.config
        collected = list(self.buffer)
        fitting = _that_fit(policy, collected, self.prompt, config)
        items = self.post_process(
            fitting, self.prompts.seed * 1_000_003 + state.global_step, n=size
        )
        metrics["verification/collected"] = len(collected)
        metrics["verification/too_long"] = len(collected) - len(fitting)
        metrics["verification/items"] = len(items)
        if not items:
            logger.warning(
                "step %d has no verification items: of %d answers collected so far none are left "
                "of one label (queries that are all wrong are dropped).",
                state.global_step + 1,
                len(collected),
            )
            return []
        rates = pass_rates(collected)
        rows = [
            {
                "prompt": self.prompt(item),
                "correct": item.correct,
                "pass_rate": rates[item.query_id],
            }
            for item in items
        ]
        changes = {"dynamic_sampling_rounds": 0, "reward_weights": None}
        config = dataclasses.replace(config, **self._one_update(len(rows)), **changes)
        task = Task("verification", train=rows, test=rows)  # type: ignore[arg-type]
        batch = collect(
            policy, task, policy.encode([row["prompt"] for row in rows]), [self.reward], config,
            Cursor(len(rows), 0), generator, state,
        )  # fmt: skip
        metrics |= {f"verification/{name}": value for name, value in batch.metrics().items()}
        metrics["generated_tokens"] += batch.generated_tokens
        self.buffer.clear()
        return [batch]

    def state_dict(self) -> dict:
        return {
            "prompts": self.prompts.state_dict(),
            "buffer": [dataclasses.astuple(item) for item in self.buffer],
        }

    def load_state_dict(self, state: dict) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.buffer.clear()
        self.buffer.extend(VerificationItem(*item) for item in state["buffer"])


def pass_rates(items: Sequence[VerificationItem]) -> dict[Hashable, float]:
    """The share of right answers to each query."""
    return {
        query: sum(item.correct for item in own) / len(own)
        for query, own in _by_query(items).items()
    }


def _labelled(
    examples: Sequence[dict],
    texts: Sequence[str],
    verifier: Callable,
    answer_of: Callable[[str], str | None] = extract_answer,
) -> list[VerificationItem]:
    """The items of completions, each with its row of data."""
    return collect_items(
        [example["prompt"] for example in examples],
        texts,
        _verified(examples, texts, verifier),
        answer_of=answer_of,
    )


def _verified(
    examples: Sequence[dict], texts: Sequence[str], verifier: Callable
) -> list[float | None]:
    columns = {name: [example[name] for example in examples] for name in examples[0]}
    prompts = columns.pop("prompt")
    return verifier(prompts=prompts, completions=texts, completion_ids=[[]] * len(texts), **columns)


def _that_fit(
    policy: Policy,
    items: Sequence[VerificationItem],
    prompt: Callable[[VerificationItem], list[dict]],
    config: GRPOConfig,
) -> list[VerificationItem]:
    """The items whose prompts leave room for a verdict in the model's context."""
    room = policy.context_length - config.max_completion_length
    lengths = map(len, policy.encode([prompt(item) for item in items]))
    return [item for item, length in zip(items, lengths, strict=True) if length <= room]


# --- measuring ------------------------------------------------------------------------------------


def _replies(
    policy: Policy, prompts: Sequence[list[dict]], n: int, config: GRPOConfig, seed: int
) -> tuple[list[str], list[int]]:
    """`n` sampled completions of each prompt, in groups: texts, and lengths in tokens."""
    rollouts = reply(
        policy,
        prompts,
        n,
        max_new_tokens=config.max_completion_length,
        batch_size=config.evaluation_batch_size,
        temperature=config.temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    return policy.decode(rollouts.completion_lists()), rollouts.lengths.tolist()


def held_out_items(
    policy: Policy,
    dataset,
    config: GRPOConfig,
    *,
    prompts: int = 128,
    seed: int = 0,
    verifier: Callable = accuracy_reward,
) -> list[VerificationItem]:
    """Balanced items from `policy`'s answers to the first `prompts` rows, to measure verdicts on.

    `config.num_generations` answers a row. Of another policy's answers than the one that grades
    them, so that all who are compared grade the same.
    """
    rows = list(dataset.select(range(min(prompts, len(dataset)))))
    repeated = [row for row in rows for _ in range(config.num_generations)]
    asked = [row["prompt"] for row in rows]
    texts, _ = _replies(policy, asked, config.num_generations, config, seed)
    items = _labelled(repeated, texts, verifier)
    return post_process(_that_fit(policy, items, verification_prompt, config), seed)


def evaluate_verdicts(
    policy: Policy,
    items: Sequence[VerificationItem],
    config: GRPOConfig,
    *,
    samples: int = 2,
    seed: int = 0,
    prompt: Callable[[VerificationItem], list[dict]] = verification_prompt,
) -> dict[str, float]:
    """`verdict_stats` of sampled verdicts on `items`, and their `mean_length` in tokens.

    Names begin with `verdicts/`. Raises ValueError for no items.
    """
    if not items:
        raise ValueError(
            "there are no items to grade: collect answers to more prompts, or from a policy that "
            "is neither always right nor always wrong."
        )
    texts, lengths = _replies(policy, [prompt(item) for item in items], samples, config, seed)
    labels = [item.correct for item in items for _ in range(samples)]
    stats = verdict_stats([parse_verdict(text) for text in texts], labels)
    stats["mean_length"] = sum(lengths) / len(lengths)
    return {f"verdicts/{name}": value for name, value in stats.items()}


def best_of_n(
    policy: Policy,
    dataset,
    config: GRPOConfig,
    *,
    prompts: int | None = None,
    n: int = 8,
    samples: int = 4,
    seed: int = 0,
    verifier: Callable = accuracy_reward,
    prompt: Callable[[VerificationItem], list[dict]] = verification_prompt,
) -> dict[str, float]:
    """Does the policy verify well enough to pick among its own answers?

    Of `n` sampled answers to each of the first `prompts` rows of `dataset` (by default
    `config.eval_prompts`) each different one gets `samples` verdicts.

    Returns the accuracy of one answer at random, `of_n/random`; of that with the largest share of
    Yes among its verdicts, `of_n/own_verdicts`, ties shared evenly; of the commonest,
    `of_n/majority`; and of an all-knowing choice, `of_n/oracle`.
    """
    prompts = config.eval_prompts if prompts is None else prompts
    rows = list(dataset.select(range(min(prompts, len(dataset)))))
    texts, _ = _replies(policy, [row["prompt"] for row in rows], n, config, seed)
    repeated = [row for row in rows for _ in range(n)]
    right = _verified(repeated, texts, verifier)
    answers = [
        collect_items([row["prompt"]] * n, texts[i * n : (i + 1) * n], right[i * n : (i + 1) * n])
        for i, row in enumerate(rows)
    ]
    different = list(dict.fromkeys(item for own in answers for item in own))
    different = _that_fit(policy, different, prompt, config)
    asked = [prompt(item) for item in different]
    said = _replies(policy, asked, samples, config, seed + 1)[0] if asked else []
    yes = {
        item: sum(parse_verdict(text) is True for text in said[i * samples : (i + 1) * samples])
        for i, item in enumerate(different)
    }
    by_verdict = by_vote = oracle = 0.0
    for own in filter(None, answers):
        votes = Counter(own)
        by_verdict += _expected(list(votes), [yes.get(item, -1) for item in votes])
        by_vote += _expected(list(votes), list(votes.values()))
        oracle += any(item.correct for item in own)
    return {
        "of_n/random": sum(value == 1 for value in right) / len(right),
        "of_n/own_verdicts": by_verdict / len(rows),
        "of_n/majority": by_vote / len(rows),
        "of_n/oracle": oracle / len(rows),
    }


def _expected(items: Sequence[VerificationItem], scores: Sequence[float]) -> float:
    """The chance of a right answer where one of the best scored is taken."""
    best = [item for item, s in zip(items, scores, strict=True) if s == max(scores)]
    return sum(item.correct for item in best) / len(best)
