"""What is measured of a trained policy besides an evaluation, and what is shown of it to read."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

import torch
from scipy.stats import mannwhitneyu

from grpo_kit import self_verification as verification
from grpo_kit.config import GRPOConfig
from grpo_kit.flow import Episode, Memory, evaluate_episodes, play, score_episodes
from grpo_kit.generation import reply
from grpo_kit.lab.evaluation import evaluate_test_set
from grpo_kit.lab.grid import Trained
from grpo_kit.models import Policy
from grpo_kit.rewards import QualityJudgeReward
from grpo_kit.rewards.diversity import load_embedder
from grpo_kit.rewards.rules import accuracy_reward, question_text
from grpo_kit.rewards.scoring import score_texts
from grpo_kit.tasks import Task
from grpo_kit.tasks.answers import extract_answer, is_correct
from grpo_kit.tiny.problems import solution_style
from grpo_kit.training import pass_at_k


def _answers(
    policy: Policy, task: Task, config: GRPOConfig, prompts: int = 32, samples: int = 8,
    seed: int = 0, batch_size: int = 128,
) -> tuple[list[dict], list[str], list[bool]]:  # fmt: skip
    """Rows of the first held-out prompts, `samples` answers to each, in groups; which are right."""
    rows = list(task.test.select(range(min(prompts, len(task.test)))))
    rollouts = reply(
        policy, [row["prompt"] for row in rows], samples, temperature=config.temperature,
        max_new_tokens=config.max_completion_length, batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    texts = policy.decode(rollouts.completion_lists())
    rows = [row for row in rows for _ in range(samples)]
    pairs = zip(texts, rows, strict=True)
    return rows, texts, [is_correct(extract_answer(text), row["answer"]) for text, row in pairs]


def answers_to_read(t: Trained) -> list[dict]:
    """One sampled answer to each of the first three held-out problems."""
    answers = _answers(t.policy, t.task, t.config, prompts=3, samples=1, seed=t.run.seed)
    return [_to_read(*answer) for answer in zip(*answers, strict=True)]


def _to_read(row: dict, completion: str, right: bool) -> dict:
    return {"prompt": question_text(row["prompt"]), "completion": completion, "right": right}


def together(functions: Sequence[Callable[[Trained], dict]], t: Trained) -> dict[str, float]:
    """What all these functions measure of a finished run."""
    measured = {}
    for function in functions:
        measured |= function(t)
    return measured


def diversity(t: Trained) -> dict[str, float]:
    """`diversity_of` the trained policy."""
    return diversity_of(t.policy, t.task, load_embedder(t.profile.embedder), t.config)


def diversity_of(policy: Policy, task: Task, embedder, config: GRPOConfig) -> dict[str, float]:
    """How different eight sampled answers to a held-out prompt are, the mean over 32 prompts.

    `distinct`: share of different texts; `styles`: effective number of the tiny world's styles, exp
    of their entropy, 1 in another world; `distance`: mean of 1 - cosine over pairs in a group.
    """
    _, texts, _ = _answers(policy, task, config)
    groups = [texts[i : i + 8] for i in range(0, len(texts), 8)]
    unique = list(dict.fromkeys(texts))
    vectors = torch.as_tensor(embedder.encode(unique)).float()
    vector_of = dict(zip(unique, torch.nn.functional.normalize(vectors, dim=1), strict=True))
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    shares = [n / len(texts) for n in Counter(map(solution_style, texts)).values()]
    return {
        "distinct": fmean(len(set(group)) / len(group) for group in groups),
        "styles": math.exp(-sum(share * math.log(share) for share in shares)),
        "distance": fmean(1 - float(vector_of[a] @ vector_of[b]) for a, b in pairs),
    }


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a right one is scored above a wrong one, ties half; NaN without both."""
    pairs = list(zip(scores, labels, strict=True))
    right, wrong = ([score for score, own in pairs if own == label] for label in (True, False))
    if not (right and wrong):
        return math.nan
    found = mannwhitneyu(right, wrong, method="asymptotic")
    return float(found.statistic) / (len(right) * len(wrong))


def quality_of(t: Trained) -> dict[str, float]:
    """`judged`: mean score, 1 to 5, of held-out answers; `assured`: share of the assured style.

    `judge/auc`: the chance that a right answer has a higher score than a wrong one.
    """
    rows, texts, right = _answers(t.policy, t.task, t.config)
    judge = QualityJudgeReward(t.profile.load_judge(t.base))
    rewards = score_texts(texts, [[]] * len(texts), rows, [judge])[:, 0]
    scored = ~rewards.isnan()
    if not scored.any():
        raise RuntimeError(f"the judge scored none of {len(texts)} answers: look at its replies.")
    return {
        "judged": 4 * (rewards[scored].mean().item() + 0.5) + 1,
        "assured": fmean(solution_style(text) == "assured" for text in texts),
        "judge/auc": auc(rewards[scored].tolist(), torch.tensor(right)[scored].tolist()),
    }


def watch_verdicts(profile, base, task: Task, config: GRPOConfig, seed, ends=False) -> Callable:
    """Measure verdicts on one balanced set of the base's answers to held-out problems."""
    items = verification.held_out_items(base, task.test, config, prompts=_fewer(config))
    measure, draws = verification.evaluate_verdicts, math.ceil(VERDICTS / max(len(items), 1))
    draws = DRAWS if ends else draws
    return partial(measure, items=items, config=config, samples=draws, seed=seed)


DRAWS = 16  # an item or question where a run starts and ends
VERDICTS = 256  # at least as many between, so that their share is known within 0.03


def _fewer(config: GRPOConfig) -> int:
    """Test problems for what costs more than an evaluation."""
    return config.eval_prompts_between or config.eval_prompts


def self_verified(t: Trained) -> dict[str, float]:
    """Verdicts at the end, what the run gained in them and in answers, and the choice among n."""
    verdicts = {k: v for k, v in t.run.history[-1].items() if k.startswith("verdicts/")}
    gains = gained(t, generation="eval/pass@1", verification="verdicts/accuracy")
    return verdicts | gains | chooses(t)


def chooses(t: Trained) -> dict[str, float]:
    """Accuracy of one answer of eight, by several choosers, see `best_of_n`."""
    return verification.best_of_n(t.policy, t.task.test, t.config, prompts=_fewer(t.config))


TRIES, TRIED, KS = 64, 32, [2**i for i in range(7)]  # answers to each of so many problems


def knows(t: Trained) -> dict[str, float]:
    """How often it is right in k tries, k to 64, on 32 problems: `before/pass@k`, `after/…`."""
    policies = {"before": t.base, "after": t.policy}
    return {f"{w}/{k}": v for w, policy in policies.items() for k, v in _knows(policy, t).items()}


def _knows(policy: Policy, t: Trained) -> dict[str, float]:
    given = TRIED, TRIES, t.run.seed, t.config.evaluation_batch_size
    _, _, right = _answers(policy, t.task, t.config, *given)
    counts = [sum(right[i : i + TRIES]) for i in range(0, len(right), TRIES)]
    return {f"pass@{k}": fmean(pass_at_k(TRIES, c, k) for c in counts) for k in KS}


def gained(t: Trained, **metrics: str) -> dict[str, float]:
    first, last = t.run.history[0], t.run.history[-1]
    return {f"gained/{name}": last[metric] - first[metric] for name, metric in metrics.items()}


def watch_episodes(profile, base, task: Task, config, seed, ends=False) -> Callable | None:
    """Measure episodes of held-out questions; the frozen roles are the base's.

    A real model plays each question twice at the ends too: its episodes take seconds.
    """
    if ends and not profile.policy.startswith("tiny-"):
        return None
    options = {"system": profile.load_agents(base), "dataset": task.test, "config": config}
    options |= {"questions": _fewer(config) or 64, "samples": DRAWS if ends else 2}
    return partial(evaluate_episodes, **options, seed=seed)


MOST_TURNS = 10


def played(t: Trained) -> dict[str, float]:
    """What a run gained, and success within k turns, to `MOST_TURNS`: `before/turns/k`, `after/…`.

    Episodes of `MOST_TURNS` are played: one that may take fewer is the beginning of one, answered
    from the memory that it then has. Not with a real model, whose episodes take seconds.
    """
    result = gained(t, success="eval/pass@1")
    if t.profile.policy.startswith("tiny-"):
        for when, policy in (("before", t.base), ("after", t.policy)):
            by_turns = enumerate(_by_turns(t, policy), 1)
            result |= {f"{when}/turns/{k}": success for k, success in by_turns}
    return result


def _by_turns(t: Trained, policy: Policy) -> list[float]:
    """Success if an episode is cut after 1, 2, ... `MOST_TURNS` turns and answered from there."""
    episodes = _episodes(t, policy, _fewer(t.config) or 64, 4, max_turns=MOST_TURNS)
    generator, success = t.profile.load_agents(t.base).generator, []
    questions = [question_text(episode.row["prompt"]) for episode in episodes]
    for k in range(1, MOST_TURNS + 1):
        memories = [Memory(episode.memory.steps[:k]) for episode in episodes]
        states = list(zip(questions, memories, strict=True))
        distinct = list(dict.fromkeys(states))
        answer_of = dict(zip(distinct, generator.answer(distinct), strict=True))
        cut = [
            dataclasses.replace(e, output=answer_of[s])
            for e, s in zip(episodes, states, strict=True)
        ]
        success.append(score_episodes(cut, [accuracy_reward])[:, 0].eq(1).float().mean().item())
    return success


def episodes_to_read(t: Trained) -> list[dict]:
    """One sampled episode of each of the first two held-out questions."""
    episodes = _episodes(t, t.policy, 2, 1)
    return [_to_read(e.row, f"{e.memory}\n{e.output}", e.reward == 1) for e in episodes]


def _episodes(t: Trained, policy: Policy, questions: int, samples: int, **limits) -> list[Episode]:
    """Scored episodes of the first held-out questions; the frozen roles are the base's."""
    episodes = play(
        t.profile.load_agents(t.base, **limits).with_planner(policy),
        list(t.task.test.select(range(min(questions, len(t.task.test))))), samples,
        generator=torch.Generator().manual_seed(t.run.seed), temperature=t.config.temperature,
        max_new_tokens=t.config.max_completion_length, batch_size=t.config.evaluation_batch_size,
    )  # fmt: skip
    score_episodes(episodes, [accuracy_reward])
    return episodes


def on_test_set(t: Trained) -> dict[str, float]:
    """`evaluate_test_set` at the end, as `test_set/…`, and what was gained since the base."""
    rows, limit = t.task.test, min(2048, 2 * t.config.max_completion_length)
    if t.profile.name == "smoke":
        rows = rows.select(range(min(t.config.eval_prompts, len(rows))))
    accuracy = partial(evaluate_test_set, rows=rows, max_new_tokens=limit)
    before, after = (accuracy(policy) for policy in (t.base, t.policy))
    gained = {f"gained/{name}": after[name] - before[name] for name in ("strict", "lenient")}
    return {f"test_set/{name}": value for name, value in after.items()} | gained
