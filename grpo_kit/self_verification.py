"""Self-verification: a policy learns to grade its own answers, and what that does to its answers.

Source: "Learning to Self-Verify Makes Language Models Better Reasoners" (arXiv 2602.07594) and its
code. Its three parts, in order:

(a) On-policy collection: `collect_items` labels the policy's own answers by the rule verifier.
(b) Post-processing: `post_process` reduces many answers to few items of many queries, half right.
(c) Self-verification: the policy samples a group of verdicts on each item, and `VerificationReward`
    compares them with the label. `SelfVerification` gives `train` the batches, by a strategy.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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
from grpo_kit.rewards.scoring import check_columns, reward_name
from grpo_kit.training import Batch, PromptBatches

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
) -> list[VerificationItem]:
    """Label N completions: one item for each that has a final answer and a reward.

    prompts, completions: as rewards get them; the last user message is the query. rewards: of the
    rule verifier, such as `accuracy_reward`; 1 is correct, None (no reference) gives no item.
    Raises ValueError where the three differ in length.
    """
    sizes = len(prompts), len(completions), len(rewards)
    if len(set(sizes)) > 1:
        message = (
            "there are {} prompts, {} completions and {} rewards; give one of each per answer."
        )
        raise ValueError(message.format(*sizes))
    items = []
    for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
        answer = extract_answer(completion_text(completion))
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
    """Drop queries whose answers are all wrong, and all but one item of those all right."""
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
    """Take one right and one wrong answer of each mixed query; returns them, and the filler.

    Filler is at most one more of each label from a mixed query, and one item of any other query.
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

    Each half comes from `chosen`, then from `filler`, then from either again. Empty where one label
    is missing: items of the other alone would teach a constant verdict.
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

    Their number is that of the queries in `items`, or `n` if that is less, rounded down to even.
    Empty where no right or no wrong items are left, or with fewer than two queries.
    """
    queries = len(_by_query(items))
    n = queries if n is None else min(n, queries)
    chosen, filler = diversify(filter_queries(items, seed), seed)
    return balance(chosen, filler, n, seed)


# --- (c) self-verification ------------------------------------------------------------------------


def verification_prompt(item: VerificationItem) -> list[dict]:
    """Ask for a graded analysis of the item's answer; role marks in the answer are broken."""
    return [{"role": "user", "content": verify_prompt(item.question, fenced(item.answer))}]


GENERATION, VERIFICATION = "generation", "verification"
INIT_SHARE = 0.4  # of the run that Verify-Init spends on verification: 400 of 1,000 steps
ALTER_EVERY = 5  # steps
_POST_PROCESS = post_process
# What the updates of a step learn from, by step (from 0) and progress (0..1).
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
    """A batch source for `train`: answers, and verdicts on them, by a strategy.

    Every step samples answers to the next prompts and puts their items into a buffer. A step that
    learns verification post-processes the buffer to at most one item per group of a batch, samples
    a group of verdicts on each, and empties it; without any item it keeps the buffer.

    Strategies: `generate` (the baseline), `self-verify` (verdicts only), `mixed` (half a batch of
    each in one update), `verify-init` (verdicts for 40 % of the run, then answers), `verify-alter`
    (answers, and after every fifth step a batch of verdicts). They generate different numbers of
    tokens per step: compare them with `max_generated_tokens`, which progress then follows.

    reward: of verdicts; gets the columns `correct` and `pass_rate`. verifier: labels answers, a
    reward; 1 is correct. Raises ValueError for an unknown strategy, a reward whose columns are
    missing, and fewer than two groups of verdicts.
    """

    def __init__(
        self,
        prompts: PromptBatches,
        strategy: str = "verify-alter",
        *,
        reward: Callable | None = None,
        post_process: Callable[..., list[VerificationItem]] = post_process,
        verifier: Callable = accuracy_reward,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}.")
        self.prompts, self.schedule = prompts, STRATEGIES[strategy]
        self.reward = VerificationReward() if reward is None else reward
        self.post_process, self.verifier = post_process, verifier
        check_columns(verifier, prompts.task.train.column_names, f"task {prompts.task.name!r}")
        check_columns(self.reward, ["correct", "pass_rate"], "a verification item")
        own = [] if post_process is _POST_PROCESS else [reward_name(post_process)]
        self.name = " ".join(["self-verification", strategy, *own])  # a resumed run must agree
        config = prompts.config
        self.groups = config.generation_batch_size // config.num_generations
        parts = 2 if strategy == "mixed" else 1
        if strategy != "generate" and self.groups // parts < 2:
            raise ValueError(
                f"generation_batch_size is {config.generation_batch_size}, {self.groups} group(s) "
                f"of {config.num_generations}: too few for one right and one wrong item of verdicts"
                f"; take {2 * parts * config.num_generations} or more."
            )
        # verify-init comes to no verification after its first part: collect no more than this
        self.buffer: deque[VerificationItem] = deque(
            maxlen=2 * ALTER_EVERY * config.generation_batch_size
        )

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        updates = self.schedule(state.global_step, state.progress)
        size = max(1, self.groups // max(len(kinds) for kinds in updates))  # groups of each kind
        (answers,) = self.prompts(generator, state, metrics, **self._one_update(size))
        texts = self.prompts.policy.decode(answers.rollouts.completion_lists())
        self.buffer.extend(_labelled(answers.examples, texts, self.verifier))
        for kinds in updates:
            parts = [answers] if GENERATION in kinds else []
            if VERIFICATION in kinds:  # sampled after an update on answers: on-policy
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

    def _verdicts(
        self, size: int, generator: torch.Generator, state: Any, metrics: dict
    ) -> list[Batch]:
        """A batch of verdicts on what is in the buffer; none where that yields no items."""
        policy, config = self.prompts.policy, self.prompts.config
        collected = list(self.buffer)
        fitting = _that_fit(policy, collected, config)
        seed = self.prompts.seed * 1_000_003 + state.global_step
        items = self.post_process(fitting, seed, n=size)
        counts = {"collected": len(collected), "too_long": len(collected) - len(fitting)}
        metrics |= {f"verification/{k}": n for k, n in (counts | {"items": len(items)}).items()}
        if not items:
            logger.warning(
                "step %d has no verification items: of %d answers collected so far none are left "
                "of one label (queries that are all wrong are dropped).",
                state.global_step + 1, len(collected),
            )  # fmt: skip
            return []
        rates = pass_rates(collected)
        rows = [
            {
                "prompt": verification_prompt(item),
                "correct": item.correct,
                "pass_rate": rates[item.query_id],
            }
            for item in items
        ]
        changes = {"dynamic_sampling_rounds": 0, "reward_weights": None}
        verdicts = self.prompts.of(rows, [self.reward])
        (batch,) = verdicts(generator, state, {}, **self._one_update(len(rows)), **changes)
        metrics |= {f"verification/{name}": value for name, value in batch.metrics().items()}
        metrics["generated_tokens"] += batch.generated_tokens
        self.buffer.clear()
        return [batch]

    def state_dict(self) -> dict:
        buffer = [dataclasses.astuple(item) for item in self.buffer]
        return {"prompts": self.prompts.state_dict(), "buffer": buffer}

    def load_state_dict(self, state: dict) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.buffer.clear()
        self.buffer.extend(VerificationItem(*item) for item in state["buffer"])


def pass_rates(items: Sequence[VerificationItem]) -> dict[Hashable, float]:
    """The share of right answers to each query."""
    queries = _by_query(items)
    return {q: sum(item.correct for item in own) / len(own) for q, own in queries.items()}


def _labelled(
    rows: Sequence[dict], texts: Sequence[str], verifier: Callable = accuracy_reward
) -> list[VerificationItem]:
    """The items of completions, each with its row of data."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    ids: list[list[int]] = [[]] * len(texts)
    rewards = verifier(prompts=prompts, completions=texts, completion_ids=ids, **columns)
    return collect_items(prompts, texts, rewards)


def _that_fit(
    policy: Policy, items: Iterable[VerificationItem], config: GRPOConfig
) -> list[VerificationItem]:
    """The items whose prompts leave room for a verdict in the model's context."""
    items = list(items)
    room = policy.context_length - config.max_completion_length
    lengths = map(len, policy.encode([verification_prompt(item) for item in items]))
    return [item for item, length in zip(items, lengths, strict=True) if length <= room]


# --- measuring ------------------------------------------------------------------------------------


def _replies(
    policy: Policy, prompts: Sequence[list[dict]], n: int, config: GRPOConfig, seed: int
) -> tuple[list[str], list[int]]:
    """`n` sampled completions of each prompt, in groups: texts, and lengths in tokens."""
    rollouts = reply(
        policy, prompts, n, max_new_tokens=config.max_completion_length,
        batch_size=config.evaluation_batch_size, temperature=config.temperature,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return policy.decode(rollouts.completion_lists()), rollouts.lengths.tolist()


def held_out_items(
    policy: Policy, dataset, config: GRPOConfig, *, prompts: int = 128, seed: int = 0
) -> list[VerificationItem]:
    """Balanced items from `policy`'s answers, `config.num_generations` to each first row."""
    rows = list(dataset.select(range(min(prompts, len(dataset)))))
    n = config.num_generations
    texts, _ = _replies(policy, [row["prompt"] for row in rows], n, config, seed)
    items = _labelled([row for row in rows for _ in range(n)], texts)
    return post_process(_that_fit(policy, items, config), seed)


def evaluate_verdicts(
    policy: Policy,
    items: Sequence[VerificationItem],
    config: GRPOConfig,
    *,
    samples: int = 2,
    seed: int = 0,
) -> dict[str, float]:
    """`verdict_stats` and `mean_length` (tokens) of verdicts on `items`, as `verdicts/…`."""
    if not items:
        raise ValueError("there are no items to grade: collect answers to more prompts.")
    prompts = [verification_prompt(item) for item in items]
    texts, lengths = _replies(policy, prompts, samples, config, seed)
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
) -> dict[str, float]:
    """Does the policy verify well enough to choose among its own answers?

    It gives `n` answers to each of the first `prompts` rows (default `config.eval_prompts`), and
    `samples` verdicts on each distinct one. Returns the accuracy `of_n/…` of a `random` answer, the
    one with most Yes among its `own_verdicts` (ties shared), the `majority`'s, and the `oracle`'s.
    """
    prompts = config.eval_prompts if prompts is None else prompts
    rows = list(dataset.select(range(min(prompts, len(dataset)))))
    texts, _ = _replies(policy, [row["prompt"] for row in rows], n, config, seed)
    answers = [_labelled([row] * n, texts[i * n : (i + 1) * n]) for i, row in enumerate(rows)]
    distinct = _that_fit(policy, dict.fromkeys(item for own in answers for item in own), config)
    asked = [verification_prompt(item) for item in distinct]
    verdicts = _replies(policy, asked, samples, config, seed + 1)[0] if asked else []
    yes = {
        item: sum(parse_verdict(text) is True for text in verdicts[i * samples : (i + 1) * samples])
        for i, item in enumerate(distinct)
    }
    by_verdict = by_vote = oracle = 0.0
    for own in filter(None, answers):
        votes = Counter(own)
        by_verdict += _expected({item: yes.get(item, -1) for item in votes})
        by_vote += _expected(votes)
        oracle += any(item.correct for item in own)
    return {
        "of_n/random": sum(item.correct for own in answers for item in own) / len(texts),
        "of_n/own_verdicts": by_verdict / len(rows),
        "of_n/majority": by_vote / len(rows),
        "of_n/oracle": oracle / len(rows),
    }


def _expected(scores: dict[VerificationItem, int]) -> float:
    """The chance of a right answer where one of the best scored is taken."""
    best = [item for item, score in scores.items() if score == max(scores.values())]
    return sum(item.correct for item in best) / len(best)
