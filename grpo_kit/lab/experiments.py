"""The experiments by name: what each asks, its arms, and what is measured of a trained policy.

basic       plain GRPO, for the curve of the README
variants    the notebooks' ways to train on word problems side by side (notebook 07)
diversity   a reward for being unlike the group (notebook 02): as published, and two remedies
judge       a judge's scores (notebook 03): added as published, as the only reward, and cures for
            what the policy then does to its judge
verification  the five strategies of self-verification and its post-processing (notebook 04)
meta        P("Yes") in place of labels (notebook 05): the paper's recipe, ours, and cures for the
            collapse of long runs
engines     plain GRPO by the kit's trainer and by TRL's (notebook 08)
published   plain GRPO on real models, as other codes print it (notebook 08)
flow        a planner in a system of agents (notebook 06): the paper's advantage and its reward at
            every turn, what differs from them, and fine-tuning on traces
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch
from anyio.from_thread import start_blocking_portal

from grpo_kit.config import GRPOConfig
from grpo_kit.flow import FlowGRPO, OfflineTraces, evaluate_episodes, play, score_episodes
from grpo_kit.lab.evaluation import GRADES, evaluate_test_set
from grpo_kit.lab.grid import Arm, Experiment, Trained, outdated
from grpo_kit.lab.records import NOTEBOOKS, Record, load
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.profiles import PROFILES, Profile
from grpo_kit.rewards import (
    DiversityReward,
    MetaEvaluationReward,
    QualityJudgeReward,
    accuracy_reward,
    extract_answer,
    format_reward,
    is_correct,
    load_embedder,
    maths_reward,
    question_text,
)
from grpo_kit.rewards.meta_evaluation import META_QUESTION, STEPS_QUESTION
from grpo_kit.self_verification import (
    SelfVerification,
    VerificationItem,
    balance,
    best_of_n,
    diversify,
    evaluate_verdicts,
    filter_queries,
    held_out_items,
    post_process,
)
from grpo_kit.tasks import Task
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.tiny.card import texts_of
from grpo_kit.tiny.problems import solution_style
from grpo_kit.training import Run, evaluate


def _answers(
    policy: Policy, task: Task, config: GRPOConfig, prompts: int, samples: int, seed: int
) -> tuple[list[dict], list[str]]:
    """Rows of the first held-out prompts and `samples` sampled answers to each, in groups."""
    rows = list(task.test.select(range(min(prompts, len(task.test)))))
    texts = texts_of(
        policy,
        [row["prompt"] for row in rows],
        torch.Generator().manual_seed(seed),
        num_generations=samples,
        temperature=config.temperature,
        limit=config.max_completion_length,
        batch_size=16,
    )
    return [row for row in rows for _ in range(samples)], texts


def answers_to_read(t: Trained) -> list[dict]:
    """One sampled answer to each of the first three held-out problems."""
    rows, texts = _answers(t.policy, t.task, t.config, prompts=3, samples=1, seed=t.run.seed)
    return [
        {
            "prompt": question_text(row["prompt"]),
            "completion": text,
            "right": is_correct(extract_answer(text), row["answer"]),
        }
        for row, text in zip(rows, texts, strict=True)
    ]


# --- diversity ------------------------------------------------------------------------------------


def diversity_of(
    policy: Policy,
    task: Task,
    embedder,
    config: GRPOConfig,
    *,
    prompts: int = 32,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """How unlike the sampled answers to one held-out prompt are, the mean over `prompts` prompts.

    Returns `distinct` (share of different texts), `styles` (effective number of solution styles of
    the tiny world, the exponential of the entropy of their shares over all answers) and `distance`
    (mean of 1 - cosine over the pairs of a group's embeddings).
    """
    _, texts = _answers(policy, task, config, prompts, samples, seed)
    groups = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    vectors = torch.as_tensor(embedder.encode(list(dict.fromkeys(texts))))
    vectors = torch.nn.functional.normalize(vectors.float(), dim=1)
    row_of = dict(zip(dict.fromkeys(texts), vectors, strict=True))
    distances = [
        1 - float(row_of[a] @ row_of[b]) for group in groups for a, b in combinations(group, 2)
    ]
    shares = [n / len(texts) for n in Counter(map(solution_style, texts)).values()]
    return {
        "distinct": fmean(len(set(group)) / samples for group in groups),
        "styles": math.exp(-sum(share * math.log(share) for share in shares)),
        "distance": fmean(distances),
    }


def _plain(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    return [accuracy_reward, format_reward]


PLAIN = Arm(_plain, options={"rewards": "plain"})


def _trained_by_trl(*arguments, **options) -> Run:
    from grpo_kit import trl_bridge  # seconds, and not needed for the other arms

    return trl_bridge.train(*arguments, **options)


def _diverse(changes: Mapping[str, object] | None = None, **options) -> Arm:
    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        embedder = load_embedder(profile.embedder)
        diversity = DiversityReward(config.num_generations, embedder, **options)
        return [accuracy_reward, format_reward, diversity]

    return Arm(rewards, changes or {}, {"rewards": "plain and diversity", **options})


# --- judge ----------------------------------------------------------------------------------------


def quality_of(
    judge,
    policy: Policy,
    task: Task,
    config: GRPOConfig,
    *,
    prompts: int = 32,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """What the judge thinks of sampled answers to held-out prompts, and what they are.

    Returns `judged` (its mean score, 1 to 5, of the answers that it could judge) and `assured` (the
    share of answers in the tiny world's style that claims to be checked).
    """
    rows, texts = _answers(policy, task, config, prompts, samples, seed)
    judged = partial(
        QualityJudgeReward(judge),
        prompts=[row["prompt"] for row in rows],
        completions=texts,
        completion_ids=[[]] * len(texts),
    )
    with start_blocking_portal() as portal:  # a notebook has an event loop running in this thread
        scores = [4 * (reward + 0.5) + 1 for reward in portal.call(judged) if reward is not None]
    if not scores:
        raise RuntimeError(
            f"the judge could judge none of {len(texts)} answers: look at what it replies"
        )
    return {
        "judged": fmean(scores),
        "assured": sum(solution_style(text) == "assured" for text in texts) / len(texts),
    }


def _judged(*weights: float, only_correct: bool = False, **changes) -> Arm:
    """Accuracy, format and judge, in this order; a weight of 0 leaves a reward to be watched."""

    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        quality = QualityJudgeReward(profile.load_judge(policy), only_correct=only_correct)
        return [accuracy_reward, format_reward, quality]

    told = {"rewards": "plain and judge", "only_correct": only_correct}
    return Arm(rewards, {"reward_weights": weights, **changes}, told)


def _two_judges(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    quality = QualityJudgeReward(profile.load_judge(policy))
    second = MetaEvaluationReward(frozen_copy(policy), STEPS_QUESTION, transform="p")
    return [accuracy_reward, format_reward, quality, second]


# --- meta-evaluation ------------------------------------------------------------------------------

PAPER = {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "none"}  # RLME's
FEW_LABELS = 32  # training problems with a label, to stop early by


def few_labels(
    profile: Profile, base: Policy, task: Task, config: GRPOConfig
) -> Callable[[Policy], dict[str, float]]:
    """Measure `few/pass@1`, on the last training problems: all the labels of early stopping.

    Their prompts may come up in training; without labels that gives nothing away.
    """
    rows = task.train.select(range(len(task.train) - FEW_LABELS, len(task.train)))
    config = dataclasses.replace(config, eval_prompts=FEW_LABELS)
    return lambda policy: {"few/pass@1": evaluate(policy, rows, config)["eval/pass@1"]}


def overrated(
    evaluator: Policy,
    policy: Policy,
    task: Task,
    config: GRPOConfig,
    *,
    prompts: int = 32,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """What the evaluator thinks of sampled answers to held-out prompts, and what they are.

    Returns `p_yes`, its mean P("Yes"), and `overrated`, that minus the share of right answers.
    """
    rows, texts = _answers(policy, task, config, prompts, samples, seed)
    prompts_of, golds = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    ids: list[list[int]] = [[]] * len(texts)
    p_yes = MetaEvaluationReward(evaluator, transform="p")(prompts_of, texts, ids)
    right = accuracy_reward(prompts_of, texts, ids, answer=golds)
    mean = fmean(p for p in p_yes if p is not None)
    return {"p_yes": mean, "overrated": mean - fmean(value == 1 for value in right)}


def stopped_early(run: Run) -> float:
    """Held-out pass@1 at the evaluation, the first of equals, with the best on the few labels."""
    rows = [row for row in run.history if "few/pass@1" in row]
    return max(rows, key=lambda row: row["few/pass@1"])["eval/pass@1"]


def read_truth(text: str, answer: str) -> float:
    """P("Yes") of an evaluator that compares with the reference as `accuracy_reward` does."""
    return 0.98 if is_correct(extract_answer(text), answer) else 0.02


def fell(run: Run) -> float:
    """How far held-out pass@1 ended below its highest value of the run."""
    accuracies = run.series("eval/pass@1")[1]
    return max(accuracies) - accuracies[-1]


def _asked(question: str = META_QUESTION, *, evaluators=None, **options) -> Arm:
    """Accuracy, only watched, format, P("Yes"); `evaluators(profile, policy)`, or a frozen copy.

    `options` are those of the reward, `changes` those of the config. A shown truth is read by the
    evaluator, but for the tiny world's, which cannot compare two answers: there by `read_truth`.
    """
    changes = options.pop("changes", {})
    told = {
        "rewards": "plain and P(Yes)",
        "question": question,
        "evaluators": getattr(evaluators, "__name__", "frozen"),
        **options,
    }

    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        asked = evaluators(profile, policy) if evaluators else frozen_copy(policy)
        reader = read_truth if profile.judge == "tiny" else None
        meta = MetaEvaluationReward(asked, question, truth_reader=reader, **options)
        return [accuracy_reward, format_reward, meta]

    return Arm(rewards, {"reward_weights": (0, 1, 1), **changes}, told)


def _ensemble(profile: Profile, policy: Policy) -> list[Policy]:
    """Three models of the tiny world; of any other, a frozen copy and the policy itself."""
    if profile.judge != "tiny":
        return [frozen_copy(policy), policy]
    return [frozen_copy(policy), *_other_tiny_models(profile)]


@functools.cache
def _other_tiny_models(profile: Profile) -> list[Policy]:
    from grpo_kit.tiny.pretrain import warm_up_more

    base = profile.load_policy()
    return [warm_up_more(base, seed) for seed in (1, 2)]


# --- self-verification ----------------------------------------------------------------------------


def unfiltered(items: Sequence[VerificationItem], seed: int, n: int) -> list[VerificationItem]:
    """`post_process` without `filter_queries`: wrong answers also of queries never answered."""
    return balance(*diversify(items, seed), n, seed)


def undiversified(items: Sequence[VerificationItem], seed: int, n: int) -> list[VerificationItem]:
    """`post_process` without `diversify`: all answers to a mixed query may come in."""
    return balance(filter_queries(items, seed), [], n, seed)


def unbalanced(items: Sequence[VerificationItem], seed: int, n: int) -> list[VerificationItem]:
    """`post_process` without `balance`: right and wrong as often as they come."""
    chosen, filler = diversify(filter_queries(items, seed), seed)
    pool = chosen + filler
    return random.Random(seed).sample(pool, min(n, len(pool)))


def _verified(strategy: str, process: Callable = post_process) -> Arm:
    return Arm(
        _plain,
        options={"strategy": strategy, "post_process": process.__name__},
        collector=lambda profile: partial(
            SelfVerification, strategy=strategy, post_process=process
        ),
    )


def graded_items(
    profile: Profile, base: Policy, task: Task, config: GRPOConfig
) -> Callable[[Policy], dict[str, float]]:
    """Measure verdicts on one set of held-out items, balanced, of the base's own answers."""
    items = held_out_items(base, task.test, config, prompts=config.eval_prompts)
    return lambda policy: evaluate_verdicts(policy, items, config, samples=1)


def self_verified(t: Trained) -> dict[str, float]:
    """Verdicts at the end, what the run gained in them and in answers, and the choice among n."""
    first, last = (t.run.history[i] for i in (0, -1))
    return {
        **{name: value for name, value in last.items() if name.startswith("verdicts/")},
        "gained/generation": last["eval/pass@1"] - first["eval/pass@1"],
        "gained/verification": last["verdicts/accuracy"] - first["verdicts/accuracy"],
        **best_of_n(t.policy, t.task.test, t.config),
        "steps": float(last["step"]),
    }


# --- Flow-GRPO ------------------------------------------------------------------------------------


def _played(collector: Callable = FlowGRPO, **options) -> Arm:
    """Episodes of tool questions, rewarded by their outcome."""

    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        return [accuracy_reward]

    def of_profile(profile: Profile) -> Callable:
        return lambda prompts: collector(prompts, profile.load_agents(prompts.policy), **options)

    return Arm(rewards, options={"collector": collector.__name__, **options}, collector=of_profile)


def held_out_episodes(
    profile: Profile, base: Policy, task: Task, config: GRPOConfig
) -> Callable[[Policy], dict[str, float]]:
    """Measure success on held-out questions, with the base in the frozen roles."""
    system = profile.load_agents(base)
    return partial(evaluate_episodes, system=system, dataset=task.test, config=config, questions=64)


def episodes_to_read(t: Trained) -> list[dict]:
    """One sampled episode of each of the first two held-out questions."""
    system = t.profile.load_agents(t.base).with_planner(t.policy)
    episodes = play(
        system,
        list(t.task.test.select(range(2))),
        generator=torch.Generator().manual_seed(t.run.seed),
        temperature=t.config.temperature,
        max_new_tokens=t.config.max_completion_length,
    )
    score_episodes(episodes, [accuracy_reward])
    return [
        {
            "prompt": question_text(episode.row["prompt"]),
            "completion": f"{episode.memory}\n{episode.output}",
            "right": episode.reward == 1,
        }
        for episode in episodes
    ]


def gained(t: Trained) -> dict[str, float]:
    """What the run changed on held-out questions: in success, turns and tool errors."""
    first, last = (t.run.history[i] for i in (0, -1))
    names = {"success": "eval/pass@1", "turns": "eval/turns", "tool_errors": "eval/tool_errors"}
    return {f"gained/{name}": last[metric] - first[metric] for name, metric in names.items()}


def _small(**changes: object) -> dict[str, dict]:
    """Sizes of the reported runs: steps of 64 answers, which two cores make in a second."""
    return {"tiny": {"generation_batch_size": 64, **changes}}


# --- real models ----------------------------------------------------------------------------------

REVISIONS = {  # commits on the Hub
    "Qwen2.5-0.5B-Instruct": "7ae557604adf67be50417f59c2c2f167def9a775",
    "Qwen2.5-1.5B-Instruct": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
    "Qwen3-0.6B-Base": "da87bfb608c14b7cf20ba1ce41287e8de496c0cd",
}
# Of GSM8K's 7,473 problems, 64 a step.
TWO_EPOCHS = {
    "max_steps": 233,
    "generation_batch_size": 512,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 128,
    "max_completion_length": 512,
    "learning_rate": 1e-5,
}


def _real(model: str, lora_rank: int = 0, task: str = "gsm8k", **changes: object) -> Arm:
    """Plain GRPO of a Qwen, all weights unless a rank is given."""
    policy = {"policy": f"Qwen/{model}", "revision": REVISIONS[model], "lora_rank": lora_rank}
    return Arm(
        _plain if task == "gsm8k" else _right_maths,
        {"per_device_train_batch_size": 8, "max_completion_length": 1024, **changes},
        {"rewards": "plain" if task == "gsm8k" else "maths"},
        profile={**policy, "task": task},
    )


def _right_maths(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    return [maths_reward, format_reward]


def examined(t: Trained, *, max_new_tokens: int = 2048) -> dict[str, float]:
    """Greedy accuracy on the whole test set, as papers report it: at the end, and what was gained.

    Returns the numbers of `evaluate_test_set` as `exam/…`, and the change of `strict` and `lenient`
    from the untrained policy as `gained/…`.
    """
    before, after = (
        evaluate_test_set(policy, t.task.test, GRADES[t.task.name], max_new_tokens=max_new_tokens)
        for policy in (t.base, t.policy)
    )
    gained = {f"gained/{name}": after[name] - before[name] for name in ("strict", "lenient")}
    return {f"exam/{name}": value for name, value in after.items()} | gained


# Trinity-RFT's runs (arXiv 2505.17826, section 3.4.2): 36 steps of 96 prompts x 8, lr 1e-5.
TRINITY = {"max_steps": 36, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "beta": 1e-3}

EXPERIMENTS = {
    "basic": Experiment(
        "What does plain GRPO make of the base?",
        {"plain": PLAIN},
        sizes={"tiny": {"max_steps": 50}},
        evaluations=2,
        show=answers_to_read,
    ),
    "variants": Experiment(
        "From one base, on the same prompts: what does each variant make of it, at what cost?",
        {
            "plain": PLAIN,
            "diversity": _diverse(),
            "judge": _judged(1, 1, 1),
            "self-verification": _verified("mixed"),
            "P(Yes), no labels": _asked(changes=PAPER),
        },
        sizes=_small(max_steps=80),
        curves=("eval/pass@1", "eval/pass@8", "entropy", "eval/mean_length"),
        evaluations=8,
        show=answers_to_read,
    ),
    "diversity": Experiment(
        "Does a reward for being unlike the group keep ways of answering alive, and at what cost?",
        {
            "plain": PLAIN,
            "diversity": _diverse(),
            "only correct": _diverse(only_correct=True),
            "normalised first": _diverse({"multi_objective_aggregation": "normalize_then_sum"}),
        },
        lambda t: diversity_of(t.policy, t.task, load_embedder(t.profile.embedder), t.config),
        sizes=_small(max_steps=80) | {"paper": TRINITY},
        show=answers_to_read,
    ),
    "judge": Experiment(
        "Does a judge's score help, what does a policy do to a judge that it is left alone with, "
        "and what prevents that?",
        {
            "plain": PLAIN,
            "judge added": _judged(1, 1, 1),
            "judge x 8": _judged(1, 1, 8),
            "judge only": _judged(0, 0, 1),
            "only correct": _judged(0, 0, 1, only_correct=True),
            "two judges": Arm(
                _two_judges, {"reward_weights": (0, 0, 1, 1)}, {"rewards": "plain, judge, P(Yes)"}
            ),
            "KL": _judged(0, 0, 1, beta=1.0),
        },
        lambda t: quality_of(t.profile.load_judge(t.base), t.policy, t.task, t.config),
        sizes=_small(max_steps=80) | {"paper": TRINITY},
        curves=(
            "rewards/quality_judge_reward/mean",
            "rewards/accuracy_reward/mean",
            "eval/pass@1",
            "completions/mean_length",
        ),
        show=answers_to_read,
    ),
    "verification": Experiment(
        "Does learning to verify teach to answer, learning to answer to verify, and what is each "
        "stage of the post-processing for? All arms generate as many tokens.",
        {
            "generate": _verified("generate"),
            "self-verify": _verified("self-verify"),
            "mixed": _verified("mixed"),
            "verify-init": _verified("verify-init"),
            "verify-alter": _verified("verify-alter"),
            "mixed, unfiltered": _verified("mixed", unfiltered),
            "mixed, undiversified": _verified("mixed", undiversified),
            "mixed, unbalanced": _verified("mixed", unbalanced),
        },
        self_verified,
        sizes=_small(max_steps=200, max_generated_tokens=130_000)
        | {
            "smoke": {"max_generated_tokens": 2_000},
            # arXiv 2602.07594, but for its dual clip; 1,000 steps of 128 x 8 answers
            "paper": {
                "generation_batch_size": 1024,
                "gradient_accumulation_steps": 64,
                "max_steps": 1000,
                "max_generated_tokens": 1_600_000_000,
                "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": 10,
                "weight_decay": 0.1,
                "epsilon_high": 0.28,
            },
        },
        changes={"num_generations_eval": 4},
        curves=("eval/pass@1", "verdicts/accuracy", "verdicts/yes_rate", "eval/mean_length"),
        watch=graded_items,
        evaluations=20,
        x="num_generated_tokens",
        show=answers_to_read,
    ),
    "meta": Experiment(
        "Can P(Yes) stand in for labels, what becomes of that in a long run, and what prevents it?",
        {
            "labels": PLAIN,
            "paper": _asked(changes=PAPER),
            "our defaults": _asked(),
            "truth 1 %": _asked(truth_fraction=0.01),
            "truth 10 %": _asked(truth_fraction=0.1),
            "ensemble": _asked(evaluators=_ensemble),
            "other question": _asked(STEPS_QUESTION),
        },
        lambda t: {
            **overrated(t.base, t.policy, t.task, t.config),
            "fell": fell(t.run),
            "stopped early": stopped_early(t.run),
            "gained/stopped early": stopped_early(t.run) - t.run.history[0]["eval/pass@1"],
        },
        sizes=_small(max_steps=120),
        changes={"num_generations_eval": 4},
        curves=("meta/p_yes", "eval/pass@1"),
        watch=few_labels,
        evaluations=10,
        show=answers_to_read,
    ),
    "engines": Experiment(
        "Does TRL's trainer, given the same config, learn as much as the kit's?",
        {
            "kit": PLAIN,
            "TRL": Arm(
                _plain, options={"rewards": "plain", "engine": "TRL"}, train=_trained_by_trl
            ),
        },
        sizes=_small(max_steps=40),
        evaluations=4,
        show=answers_to_read,
    ),
    "published": Experiment(
        "Does plain GRPO do for a real model what other codes print of it?",
        {
            "0.5B": _real(
                "Qwen2.5-0.5B-Instruct",
                max_steps=20,
                generation_batch_size=800,
                gradient_accumulation_steps=100,
                learning_rate=1e-6,
            ),
            "0.5B, LoRA": _real("Qwen2.5-0.5B-Instruct", 32, **TWO_EPOCHS),
            "1.5B, LoRA": _real("Qwen2.5-1.5B-Instruct", 32, **TWO_EPOCHS),
            # One problem a step and the plain sum over tokens; its top_p of 0.9 is 1 here.
            "Qwen3 0.6B, MATH": _real(
                "Qwen3-0.6B-Base",
                task="competition_math",
                max_steps=50,
                generation_batch_size=8,
                gradient_accumulation_steps=1,
                learning_rate=1e-5,
                weight_decay=0.01,
                temperature=0.8,
                loss_type="dr_grpo",
                max_completion_length=512,
            ),
        },
        examined,
        changes={"lr_scheduler_type": "constant", "eval_prompts": 200},
        evaluations=4,
        show=answers_to_read,
    ),
    "flow": Experiment(
        "Does training a planner in the flow raise success, and does it need the advantage of "
        "trajectories, the reward at every turn, and play of its own?",
        {
            "trajectory": _played(),
            "per turn": _played(per="turn"),
            "final turn only": _played(credit="final"),
            "offline traces": _played(OfflineTraces),
        },
        gained,
        sizes={
            "smoke": {"max_completion_length": 48},
            **_small(max_steps=24, learning_rate=3e-4, max_completion_length=48),
            # AgentFlow (arXiv 2510.05592): 32 x 8 trajectories, T 0.5, 2,048 tokens
            "paper": {
                "generation_batch_size": 256,
                "gradient_accumulation_steps": 16,
                "max_completion_length": 2048,
                "temperature": 0.5,
                "beta": 1e-3,
            },
        },
        changes={"loss_type": "grpo", "eval_prompts": 0},
        curves=("reward", "eval/pass@1", "eval/turns", "eval/tool_errors"),
        watch=held_out_episodes,
        evaluations=3,
        task=tool_questions,
        show=episodes_to_read,
    ),
}


def load_current(
    results: str | Path | None = None, profile: str = "*", experiment: str = "*"
) -> tuple[list[Record], list[str]]:
    """`records.load` of the experiments' runs, without those that this version would run otherwise.

    A sentence says what is different, once for the runs of an arm.
    """
    found, problems = load(results, profile, experiment)
    current, differences = [], {}
    for record in found:
        if record.experiment == NOTEBOOKS:
            continue
        why = "there is no such experiment or profile any more."
        if record.experiment in EXPERIMENTS and record.profile in PROFILES:
            why = outdated(record, EXPERIMENTS[record.experiment], PROFILES[record.profile])
        if why:
            differences[record.profile, record.experiment, record.arm, why] = None
        else:
            current.append(record)
    problems += [
        f"runs of {name!r}, {arm!r}, profile {profile!r}, are left out: {why} "
        f"`grpo-kit run {name} --profile {profile}` makes them again."
        for profile, name, arm, why in differences
    ]
    return current, problems
