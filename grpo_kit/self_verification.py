"""Self-verification: a policy learns to grade its own answers, and what that does to its answers.

Source: "Learning to Self-Verify Makes Language Models Better Reasoners" (arXiv 2602.07594). Answers
of the policy become labelled items (`collect_items`), few of many queries and half of them right
(`post_process`). `SelfVerification` trains on groups of verdicts on them, by a strategy.
"""

import dataclasses
import logging
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from grpo_kit.config import GRPOConfig
from grpo_kit.generation import reply
from grpo_kit.models import Policy
from grpo_kit.rewards import rules
from grpo_kit.rewards.judge.texts import fenced
from grpo_kit.rewards.scoring import check_columns, reward_name, score_texts
from grpo_kit.tasks.answers import extract_answer
from grpo_kit.training import Batch, PromptBatches

logger = logging.getLogger(__name__)


def verify_prompt(question: str, answer: str) -> str:
    """Ask for an analysis of a proposed final answer, without its reasoning, and a verdict."""
    return f"{question}\nProposed answer: {answer}\nIs it correct? Check, then answer Yes or No."


@dataclasses.dataclass(frozen=True)
class VerificationItem:
    """One answer to one query, with its label: is it correct?"""

    query_id: Hashable
    question: str
    answer: str
    correct: bool


Items = Sequence[VerificationItem]


def collect_items(
    prompts: Sequence, completions: Sequence, rewards: Sequence[float | None]
) -> list[VerificationItem]:
    """Label completions by the rewards of a rule verifier (1 is correct): `accuracy_reward`'s, say.

    A completion without a final answer, or with the reward None, gives no item.
    """
    items = []
    for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
        answer = extract_answer(rules.completion_text(completion))
        if answer and reward is not None:
            question = rules.question_text(prompt)
            items.append(VerificationItem(question, question, answer, reward == 1))
    return items


def _by_query(items: Items) -> dict[Hashable, list[VerificationItem]]:
    queries = defaultdict(list)
    for item in items:
        queries[item.query_id].append(item)
    return queries


def filter_queries(items: Items, seed: int = 0) -> list[VerificationItem]:
    """Drop queries whose answers are all wrong, and all but one item of those all right."""
    rng, kept = random.Random(f"filter-{seed}"), []
    for own in _by_query(items).values():
        labels = {item.correct for item in own}
        if labels == {True}:
            kept.append(rng.choice(own))
        elif labels == {True, False}:
            kept += own
    return kept


def diversify(items: Items, seed: int = 0) -> tuple[list, list]:
    """Return one right and one wrong item of each mixed query, and filler.

    Filler is at most one more of each label from a mixed query, and one item of any other query.
    """
    rng, chosen, filler = random.Random(f"diversify-{seed}"), [], []
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


def balance(chosen: Items, filler: Items, n: int, seed: int = 0) -> list[VerificationItem]:
    """Shuffle n // 2 right and n // 2 wrong items from `chosen`, then `filler`, then either again.

    Empty where one label is missing: items of the other alone would teach a constant verdict.
    """
    rng, half, result = random.Random(f"balance-{seed}"), n // 2, []
    for label in (True, False):
        pools = [[i for i in pool if i.correct is label] for pool in (chosen, filler)]
        own, spare = (rng.sample(pool, len(pool)) for pool in pools)
        if not own + spare:
            return []
        missing = max(0, half - len(own + spare))
        result += (own + spare)[:half] + rng.choices(spare or own, k=missing)
    rng.shuffle(result)
    return result


def post_process(items: Items, seed: int, n: int | None = None) -> list[VerificationItem]:
    """`filter_queries`, `diversify`, `balance`: one item per query, at most `n`, an even number."""
    queries = len(_by_query(items))
    n = queries if n is None else min(n, queries)
    chosen, filler = diversify(filter_queries(items, seed), seed)
    return balance(chosen, filler, n, seed)


def verification_prompt(item: VerificationItem) -> list[dict]:
    """Ask for a graded analysis of the item's answer; role marks in the answer are broken."""
    return [{"role": "user", "content": verify_prompt(item.question, fenced(item.answer))}]


INIT_SHARE = 0.4  # of the run that Verify-Init spends on verification: 400 of 1,000 steps
ALTER_EVERY = 5  # steps
ONE_UPDATE = {"per_device_train_batch_size": None, "gradient_accumulation_steps": 1}
# What each update of a step learns from, by step (from 0) and share of the run spent (0..1):
# "G" answers (generation), "V" verdicts (verification), "GV" both.
STRATEGIES: dict[str, Callable[[int, float], list[str]]] = {
    "generate": lambda step, spent: ["G"],  # the baseline
    "self-verify": lambda step, spent: ["V"],
    "mixed": lambda step, spent: ["GV"],  # half a batch of each
    "verify-init": lambda step, spent: ["V" if spent < INIT_SHARE else "G"],
    "verify-alter": lambda step, spent: ["G"] if (step + 1) % ALTER_EVERY else ["G", "V"],
}


class SelfVerification:
    """A batch source for `train`: answers, and verdicts on them, by a strategy.

    Every step samples answers and adds their items to a buffer. A step that learns verification
    post-processes the buffer, samples a group of verdicts on each item, and empties it.

    strategy: one of `STRATEGIES`. They generate different numbers of tokens per step: compare them
    with `max_generated_tokens`.
    reward: of verdicts; gets the column `correct`.
    Raises ValueError for an unknown strategy, missing columns, or fewer than two verdict groups.
    """

    def __init__(
        self, prompts: PromptBatches, strategy: str, *, reward=None, post_process=post_process
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}.")
        task, config = prompts.task, prompts.config
        check_columns(prompts.correct, task.train.column_names, f"task {task.name!r}")
        self.reward = rules.VerificationReward() if reward is None else reward
        check_columns(self.reward, ["correct"], "a verification item")
        size, group = config.generation_batch_size, config.num_generations
        least = {"generate": 1, "mixed": 4}.get(strategy, 2) * group
        if size < least:
            few = f"generation_batch_size is {size}, too few for one right and one wrong item"
            raise ValueError(f"{few} of {group} verdicts each: take {least} or more.")
        self.prompts, self.schedule, self.post_process = prompts, STRATEGIES[strategy], post_process
        process = reward_name(post_process)  # a resumed run must have the same name
        self.name = f"self-verification {strategy} {process}".removesuffix(" post_process")
        # the items of each step; bounded, as verify-init flushes none after its first part
        self.buffer: deque[list[VerificationItem]] = deque(maxlen=2 * ALTER_EVERY)

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        updates, config = self.schedule(state.global_step, state.progress), self.prompts.config
        groups = config.generation_batch_size // config.num_generations
        size = max(1, groups // max(len(kinds) for kinds in updates))  # groups of each kind
        changes = ONE_UPDATE | {"generation_batch_size": size * config.num_generations}
        (answers,) = self.prompts(generator, state, metrics, **changes)
        texts = self.prompts.policy.decode(answers.rollouts.completion_lists())
        given = self.prompts.policy, answers.examples, texts, config, self.prompts.correct
        self.buffer.append(labelled(*given))
        for kinds in updates:
            parts = [answers] if "G" in kinds else []
            if "V" in kinds:  # sampled after an update on answers: on-policy
                parts += self._verdicts(size, generator, state, metrics)
            if parts:
                yield parts[0] if len(parts) == 1 else Batch.concatenate(parts)

    def _verdicts(self, n: int, generator: torch.Generator, state, metrics: dict) -> list[Batch]:
        """A batch of verdicts on the buffer's items; none where post-processing leaves no item."""
        config = self.prompts.config
        collected = [item for items in self.buffer for item in items]
        items = self.post_process(collected, self.prompts.seed * 1_000_003 + state.global_step, n=n)
        metrics["verification/items"] = len(items)
        if not items:
            logger.warning("step %d has no verification items", state.global_step + 1)
            return []
        rows = [{"prompt": verification_prompt(i), "correct": i.correct} for i in items]
        changes = ONE_UPDATE | {"dynamic_sampling_rounds": 0, "reward_weights": None}
        changes["generation_batch_size"] = len(rows) * config.num_generations
        (batch,) = self.prompts.of(rows, [self.reward])(generator, state, {}, **changes)
        metrics |= {f"verification/{name}": value for name, value in batch.metrics().items()}
        metrics["generated_tokens"] += batch.generated_tokens
        self.buffer.clear()
        return [batch]

    def state_dict(self) -> dict:
        buffer = [[*map(dataclasses.astuple, items)] for items in self.buffer]
        return {"prompts": self.prompts.state_dict(), "buffer": buffer}

    def load_state_dict(self, state: dict) -> None:
        self.prompts.load_state_dict(state["prompts"])
        for items in state["buffer"]:
            self.buffer.append([VerificationItem(*item) for item in items])


def labelled(
    policy: Policy, rows: Sequence[dict], texts: Sequence[str], config: GRPOConfig,
    correct: Callable = rules.accuracy_reward,
) -> list[VerificationItem]:  # fmt: skip
    """The items of one answer to each row of a task, labelled by the reward `correct`.

    An answer so long that the model's context has no room for a verdict on it gives no item.
    """
    ids = policy.tokenizer(list(texts), add_special_tokens=False).input_ids
    values = score_texts(texts, ids, rows, [correct])[:, 0].tolist()
    rewards = [None if math.isnan(value) else value for value in values]
    items = collect_items([row["prompt"] for row in rows], texts, rewards)
    room = policy.context_length - config.max_completion_length
    lengths = map(len, policy.encode([verification_prompt(item) for item in items]))
    return [item for item, length in zip(items, lengths, strict=True) if length <= room]


def _replies(
    policy: Policy, prompts: Sequence[list[dict]], n: int, config: GRPOConfig, seed: int = 0
) -> tuple[list[str], list[int]]:
    """`n` sampled completions of each prompt, in groups: texts, and lengths in tokens."""
    if not prompts:
        return [], []
    rollouts = reply(
        policy, prompts, n, max_new_tokens=config.max_completion_length,
        batch_size=config.evaluation_batch_size, temperature=config.temperature,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return policy.decode(rollouts.completion_lists()), rollouts.lengths.tolist()


def _answers(
    policy: Policy, dataset, prompts: int, n: int, config: GRPOConfig, correct: Callable
) -> list[list]:
    """The items of `n` sampled answers to each of the first `prompts` rows."""
    rows = list(dataset.select(range(min(prompts, len(dataset)))))
    texts, _ = _replies(policy, [row["prompt"] for row in rows], n, config)
    return [
        labelled(policy, [row] * n, texts[i * n : (i + 1) * n], config, correct)
        for i, row in enumerate(rows)
    ]


def held_out_items(
    policy: Policy, dataset, config: GRPOConfig, *, prompts: int = 128,
    correct: Callable = rules.accuracy_reward,
) -> list[VerificationItem]:  # fmt: skip
    """Balanced items from `policy`'s answers, `config.num_generations` to each first row."""
    answers = _answers(policy, dataset, prompts, config.num_generations, config, correct)
    return post_process([item for own in answers for item in own], seed=0)


def evaluate_verdicts(
    policy: Policy, items: Items, config: GRPOConfig, *, samples: int = 2, seed: int = 0
) -> dict[str, float]:
    """`verdict_stats` and `mean_length` (tokens) of verdicts on `items`, as `verdicts/…`."""
    if not items:
        raise ValueError("there are no items to grade: collect answers to more prompts.")
    prompts = [verification_prompt(item) for item in items]
    texts, lengths = _replies(policy, prompts, samples, config, seed)
    labels = [item.correct for item in items for _ in range(samples)]
    stats = rules.verdict_stats([rules.parse_verdict(text) for text in texts], labels)
    stats["mean_length"] = fmean(lengths)
    return {f"verdicts/{name}": value for name, value in stats.items()}


def best_of_n(
    policy: Policy, dataset, config: GRPOConfig, *, prompts: int, n: int = 8, samples: int = 4,
    correct: Callable = rules.accuracy_reward,
) -> dict[str, float]:  # fmt: skip
    """Accuracy `of_n/…` when one of `n` answers to each of the first `prompts` rows is taken.

    It is taken at `random`, by most Yes among `samples` of its `own_verdicts` (ties shared), by
    `majority`, or by an `oracle`.
    """
    answers = _answers(policy, dataset, prompts, n, config, correct)
    items = list(dict.fromkeys(item for own in answers for item in own))
    verdicts, _ = _replies(policy, [*map(verification_prompt, items)], samples, config, seed=1)
    yes = Counter()
    for i, text in enumerate(verdicts):
        yes[items[i // samples]] += rules.parse_verdict(text) is True
    totals = dict.fromkeys(("random", "own_verdicts", "majority", "oracle"), 0.0)
    for own in filter(None, answers):
        votes = Counter(own)
        totals["random"] += sum(item.correct for item in own) / n
        totals["own_verdicts"] += _best({item: yes[item] for item in votes})
        totals["majority"] += _best(votes)
        totals["oracle"] += any(item.correct for item in own)
    return {f"of_n/{name}": total / len(answers) for name, total in totals.items()}


def _best(scores: dict[VerificationItem, int]) -> float:
    """The share of right answers among those with the highest score."""
    best = [item for item, score in scores.items() if score == max(scores.values())]
    return fmean(item.correct for item in best)
