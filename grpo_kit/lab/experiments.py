"""The experiments by name: what each asks, its arms, and what is measured of a trained policy.

A stored run belongs to an arm by config and `options` (`Experiment.identity`): to change one, or to
rename a function that the options name, makes its runs outdated.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from grpo_kit import self_verification as verification
from grpo_kit.config import GRPOConfig
from grpo_kit.flow import FlowGRPO, OfflineTraces
from grpo_kit.lab import measures
from grpo_kit.lab.grid import Arm, Experiment, command_of, outdated
from grpo_kit.lab.records import NOTEBOOKS, Record, load
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.profiles import PROFILES, Profile
from grpo_kit.rewards import CertaintyReward, DiversityReward, MajorityReward, QualityJudgeReward
from grpo_kit.rewards.diversity import load_embedder
from grpo_kit.rewards.meta_evaluation import (
    BREVITY_QUESTION,
    META_QUESTION,
    STEPS_QUESTION,
    MetaEvaluationReward,
)
from grpo_kit.rewards.rules import accuracy_reward, format_reward
from grpo_kit.runs import Run
from grpo_kit.tasks.answers import extract_answer, is_correct
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.tiny.pretrain import BREVITY_STEPS, warm_up_more
from grpo_kit.training import PromptBatches
from grpo_kit.warm_up import RECIPES, GivenTexts, take_replies


def _rewards(kind: str, options: Mapping, profile: Profile, config, policy) -> list[Callable]:
    """Rewards for accuracy and format, and those that the arms of this kind add."""
    rewards = [accuracy_reward, format_reward]
    if kind == "plain and diversity":
        embedder = load_embedder(profile.embedder)
        rewards.append(DiversityReward(config.num_generations, embedder, **options))
    if kind == "plain and P(Yes)":
        rewards.append(_meta_evaluation(profile, policy, **options))
    if kind == "plain and majority":
        rewards.append(MajorityReward(config.num_generations))
    if kind == "plain and certainty":
        rewards.append(CertaintyReward(policy, **options))
    if "judge" in kind:
        rewards.append(QualityJudgeReward(profile.load_judge(policy), **options))
    if kind == "plain, judge, P(Yes)":
        rewards.append(MetaEvaluationReward(frozen_copy(policy), STEPS_QUESTION, transform="p"))
    return rewards


def _arm(kind: str, changes: Mapping[str, object] | None = None, **options: object) -> Arm:
    return Arm(partial(_rewards, kind, options), changes or {}, {"rewards": kind, **options})


def _judged(*weights: float, only_correct: bool = False, **changes) -> Arm:
    """The weights are of accuracy, format and judge; a reward of weight 0 is only logged."""
    changes = {"reward_weights": weights, **changes}
    return _arm("plain and judge", changes, only_correct=only_correct)


PLAIN = _arm("plain")


def _trained_by_trl(*arguments, **options) -> Run:
    from grpo_kit import trl_bridge  # takes seconds, and the other arms do not need it

    return trl_bridge.train(*arguments, **options)


def read_truth(text: str, answer: str) -> float:
    """P("Yes") of an evaluator that compares with the reference as `accuracy_reward` does."""
    return 0.98 if is_correct(extract_answer(text), answer) else 0.02


def _p_yes(
    question: str | tuple[str, ...] = META_QUESTION, changes: Mapping | None = None, **options
) -> Arm:
    """Accuracy, only logged, format, and P("Yes"); `options` are the reward's and `evaluators`."""
    options = {"question": question, "evaluators": "frozen", **options}
    return _arm("plain and P(Yes)", {"reward_weights": (0, 1, 1), **(changes or {})}, **options)


def _meta_evaluation(
    profile: Profile, policy: Policy, *, question: str | Sequence[str], evaluators: str, **options
) -> MetaEvaluationReward:
    """Shown a truth, the evaluator reads it; the tiny world's needs `read_truth` to compare it.

    `evaluators`: "frozen", the policy as it is now; "live", as it becomes; "warmer", the base after
    more of its warm-up; "_ensemble", frozen and two warmer ones, or frozen and live; "brevity",
    the base once it has been taught to say whether an answer is short.
    """
    tiny = profile.policy == "tiny-base"
    warmer = (warm_up_more(profile.load_policy(), seed) for seed in (1, 2))
    match evaluators:
        case "live":
            chosen = [policy]
        case "warmer" if tiny:
            chosen = [next(warmer)]
        case "brevity" if tiny:
            chosen = [_taught_brevity()]
        case "warmer" | "brevity":
            raise ValueError(f'"{evaluators}" is an evaluator of the tiny world: choose another.')
        case "_ensemble":
            chosen = [frozen_copy(policy), *(warmer if tiny else [policy])]
        case _:
            chosen = [frozen_copy(policy)]
    reader = read_truth if profile.judge == "tiny" else None
    return MetaEvaluationReward(chosen, question, truth_reader=reader, **options)


@cache
def _taught_brevity() -> Policy:
    """One for all runs of a process. Half as many steps left it unsure which answer is shorter."""
    return warm_up_more(PROFILES["tiny"].load_policy(), 1, BREVITY_STEPS, "brevity")


# `post_process` without a stage each; the names of these functions are hashed.
def unfiltered(items: Sequence, seed: int, n: int) -> list:
    return verification.balance(*verification.diversify(items, seed), n, seed)


def undiversified(items: Sequence, seed: int, n: int) -> list:
    return verification.balance(verification.filter_queries(items, seed), [], n, seed)


def unbalanced(items: Sequence, seed: int, n: int) -> list:
    chosen, filler = verification.diversify(verification.filter_queries(items, seed), seed)
    pool = chosen + filler
    return random.Random(seed).sample(pool, min(n, len(pool)))


def _verified(strategy: str, process: Callable = verification.post_process) -> Arm:
    source = partial(verification.SelfVerification, strategy=strategy, post_process=process)
    options = {"strategy": strategy, "post_process": process.__name__}
    return dataclasses.replace(PLAIN, options=options, batch_source=lambda profile: source)


def _more_texts(profile: Profile) -> Callable:
    """The warm-up goes on, with texts of the profile's task."""
    texts = RECIPES["svamp" if profile.task == "svamp" else "skills"].texts

    def source(prompts: PromptBatches) -> GivenTexts:
        config, rng = prompts.config, random.Random(f"more-{prompts.seed}")
        count = config.max_steps * config.generation_batch_size
        return GivenTexts(prompts, take_replies(prompts.policy, texts(rng), count))

    return source


def _corrected(**changes: object) -> Arm:
    """Two updates a batch, so that the ratio leaves 1 and a clip can act."""
    return _arm("plain", {"num_iterations": 2, **changes})


# on SmolLM2 a step takes 1.3 times as long as one of GRPO with twice as many answers
MORE_TEXTS = {"generation_batch_size": 128, "num_generations": 128, "learning_rate": 5e-5}


def _played(source: Callable = FlowGRPO, changes: Mapping | None = None, **options) -> Arm:
    """Episodes of tool questions, rewarded by their outcome."""

    def of_profile(profile: Profile) -> Callable:
        return lambda prompts: source(prompts, profile.load_agents(prompts.policy), **options)

    hashed = {"collector": source.__name__, **options}
    return Arm(lambda *_: [accuracy_reward], changes or {}, hashed, batch_source=of_profile)


def _outcome_judged(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    """A frozen copy says whether an output is right, the reference shown; accuracy is logged."""
    judge = MetaEvaluationReward(frozen_copy(policy), transform="p", truth_fraction=1.0)
    return [accuracy_reward, judge]


REVISIONS = {  # commits on the Hub
    "Qwen2.5-0.5B-Instruct": "7ae557604adf67be50417f59c2c2f167def9a775",
    "Qwen2.5-1.5B-Instruct": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
}


def _real(model: str, lora_rank: int = 0, **changes: object) -> Arm:
    """Plain GRPO of a Qwen, all weights unless a rank is given."""
    changes = {"per_device_train_batch_size": 8, "max_completion_length": 1024, **changes}
    policy = {"policy": f"Qwen/{model}", "revision": REVISIONS[model], "lora_rank": lora_rank}
    return dataclasses.replace(_arm("plain", changes), profile={**policy, "task": "gsm8k"})


ALONE = {"reward_weights": (0, 0, 1)}  # not accuracy, not format
UNCORRECTED = {"beta": 0.04, "use_bias_correction_kl": False}
LONG = {"max_generated_tokens": 240_000, "eval_steps": 50}
NORMALISED = {"multi_objective_aggregation": "normalize_then_sum"}
PAPER = {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "none"}  # RLME's
# Trinity-RFT's runs (arXiv 2505.17826, section 3.4.2): 36 steps of 96 prompts x 8, lr 1e-5.
TRINITY = {"max_steps": 36, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "beta": 1e-3}
# arXiv 2602.07594, but for its dual clip: 1,000 steps of 128 x 8 answers.
SELF_VERIFICATION = {
    "generation_batch_size": 1024, "gradient_accumulation_steps": 64, "max_steps": 1000,
    "max_generated_tokens": 1_600_000_000, "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10, "weight_decay": 0.1, "epsilon_high": 0.28,
}  # fmt: skip
# AgentFlow (arXiv 2510.05592): 32 x 8 trajectories.
AGENTFLOW = {
    "generation_batch_size": 256, "gradient_accumulation_steps": 16, "temperature": 0.5,
    "max_completion_length": 2048, "beta": 1e-3,
}  # fmt: skip
# Of GSM8K's 7,473 problems, 64 a step.
TWO_EPOCHS = {
    "max_steps": 233, "generation_batch_size": 512, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 128, "max_completion_length": 512, "learning_rate": 1e-5,
}  # fmt: skip
TWENTY_STEPS = {
    "max_steps": 20, "generation_batch_size": 800, "gradient_accumulation_steps": 100,
    "learning_rate": 1e-6,
}  # fmt: skip


def _small(smol: Mapping[str, object] | None = None, **changes: object) -> dict[str, dict]:
    """Sizes of the reported runs: steps of 64 answers, which two cores make in a second.

    `smol`: changes to what a run of the real model has.
    """
    tiny = WHOLE_TEST | {"generation_batch_size": 64}
    return {"tiny": tiny | changes, "smol": SMOL | (smol or {})}


WHOLE_TEST = {"eval_prompts": 500, "eval_prompts_between": 128}
SMOL = {"max_steps": 12, "eval_steps": 0, "save_steps": 4, "eval_prompts": 300,
        "eval_prompts_between": 64, "generation_batch_size": 64}  # fmt: skip
# SVAMP's answers share no style to be learnt: in small batches its gradient is mostly noise
SVAMP = SMOL | {"max_steps": 16, "generation_batch_size": 256}

FEW_EPISODES = {"eval_prompts_between": 4}

_experiment = partial(Experiment, show=measures.answers_to_read)

EXPERIMENTS = {
    "basic": _experiment(
        "What does plain GRPO make of the base, and what as many steps of more warm-up?",
        {"plain": PLAIN,
         "more warm-up": dataclasses.replace(
             _arm("plain", MORE_TEXTS, texts="warm-up"), batch_source=_more_texts)},
        measures.knows, evaluations=2,
        sizes={"tiny": WHOLE_TEST | {"max_steps": 50}, "smol": SVAMP | {"eval_steps": 4}},
    ),
    "rare": _experiment(
        "Where few answers are right, what do smaller batches, larger steps, MaxRL's advantage, "
        "groups sampled again until they differ, and larger groups bring, for as many tokens?",
        {"plain": PLAIN,
         "batches of 64": _arm("plain", {"generation_batch_size": 64}),
         "learning rate 3e-5": _arm("plain", {"learning_rate": 3e-5}),
         "MaxRL": _arm("plain", {"scale_rewards": "mean"}),
         "dynamic sampling": _arm("plain", {"dynamic_sampling_rounds": 2}),
         "groups of 16": _arm("plain", {"num_generations": 16})},
        x="num_generated_tokens", changes={"reward_weights": (1, 0)}, evaluations=4,
        sizes={"smoke": {"max_generated_tokens": 2_000},
               "tiny": WHOLE_TEST | {"max_steps": 200, "max_generated_tokens": 100_000},
               "smol": SVAMP | {"max_steps": 200, "max_generated_tokens": 100_000}},
    ),
    "variants": _experiment(
        "From one base, on the same prompts: what does each variant make of it, at what cost?",
        {"plain": PLAIN,
         "diversity": _arm("plain and diversity"),
         "judge": _judged(1, 1, 1),
         "self-verification": _verified("mixed"),
         "P(Yes), no labels": _p_yes(changes=PAPER)},
        sizes=_small(max_steps=80), evaluations=8, skills=True,
        curves=("eval/pass@1", "eval/pass@8", "entropy", "eval/mean_length"),
    ),
    "diversity": _experiment(
        "Does a reward for being unlike the group keep ways of answering alive, and at what cost?",
        {"plain": PLAIN,
         "diversity": _arm("plain and diversity"),
         "only correct": _arm("plain and diversity", only_correct=True),
         "normalised first": _arm("plain and diversity", NORMALISED)},
        lambda t: measures.diversity_of(
            t.policy, t.task, load_embedder(t.profile.embedder), t.config),
        sizes={**_small(max_steps=80), "paper": TRINITY}, skills=True,
    ),
    "judge": _experiment(
        "Does a judge's score help, what does a policy do to a judge that it is left alone with, "
        "and what prevents that?",
        {"plain": PLAIN,
         "judge added": _judged(1, 1, 1),
         "judge x 8": _judged(1, 1, 8),
         "judge only": _judged(0, 0, 1),
         "only correct": _judged(0, 0, 1, only_correct=True),
         "two judges": _arm("plain, judge, P(Yes)", {"reward_weights": (0, 0, 1, 1)}),
         "KL": _judged(0, 0, 1, beta=1.0)},
        measures.quality_of, skills=True,
        sizes={**_small({"max_steps": 8}, max_steps=80), "paper": TRINITY},
        curves=("rewards/quality_judge_reward/mean", "rewards/accuracy_reward/mean",
                "eval/pass@1", "completions/mean_length"),
    ),
    "verification": _experiment(
        "Does learning to verify teach to answer, learning to answer to verify, and what is each "
        "stage of the post-processing for? All arms generate as many tokens.",
        {**{strategy: _verified(strategy) for strategy in
            ("generate", "self-verify", "mixed", "verify-init", "verify-alter")},
         "mixed, unfiltered": _verified("mixed", unfiltered),
         "mixed, undiversified": _verified("mixed", undiversified),
         "mixed, unbalanced": _verified("mixed", unbalanced)},
        measures.self_verified, watch=measures.watch_verdicts, x="num_generated_tokens",
        skills=True,
        sizes={"smoke": {"max_generated_tokens": 2_000}, "paper": SELF_VERIFICATION,
               **_small({"max_steps": 200, "max_generated_tokens": 32_000,
                         "eval_prompts_between": 48},
                        max_steps=200, max_generated_tokens=130_000, num_generations_eval=8)},
        changes={"num_generations_eval": 4}, evaluations=10, evaluator=2,
        curves=("eval/pass@1", "verdicts/accuracy", "verdicts/yes_rate", "eval/mean_length"),
    ),
    "meta": _experiment(
        "Can P(Yes) stand in for labels, what becomes of that in a long run, and what prevents it?",
        {"labels": PLAIN,
         "P(Yes) and format": _p_yes(changes=PAPER),
         "P(Yes) alone": _p_yes(changes=PAPER | ALONE),
         "our defaults": _p_yes(),
         "truth 1 %": _p_yes(truth_fraction=0.01),
         "truth 10 %": _p_yes(truth_fraction=0.1),
         "ensemble": _p_yes(evaluators="_ensemble"),
         "live evaluator": _p_yes(evaluators="live"),
         "warmer evaluator": _p_yes(evaluators="warmer"),
         "other question": _p_yes(STEPS_QUESTION),
         "both questions": _p_yes((META_QUESTION, STEPS_QUESTION))},
        lambda t: measures.overrated(t) | measures.without_labels(t.run),
        watch=measures.few_labels, skills=True,
        sizes=_small({"eval_steps": 4}, max_steps=120, num_generations_eval=8),
        changes={"num_generations_eval": 4}, evaluations=10,
        curves=("meta/p_yes", "eval/pass@1"),
    ),
    "label-free": _experiment(
        "What do rewards without labels make of a policy: which rise, which collapse, and when?",
        {"labels": _arm("plain", {"reward_weights": (1, 0)}),
         "majority": _arm("plain and majority", ALONE),
         "self-certainty": _arm("plain and certainty", ALONE, measure="self-certainty"),
         "likelihood": _arm("plain and certainty", ALONE, measure="likelihood")},
        lambda t: measures.without_labels(t.run), watch=measures.few_labels, skills=True,
        sizes=_small({"eval_steps": 4}, max_steps=120), evaluations=10, evaluator=2,
        curves=("eval/pass@1", "entropy", "eval/mean_length"),
    ),
    "brevity": _experiment(
        "Asked whether an answer is short, beside whether it is correct: how much shorter do "
        "answers get, and at what cost?",
        {"labels": PLAIN,
         "correct alone": _p_yes(evaluators="brevity"),
         **{f"short x {w:g}": _p_yes((META_QUESTION, BREVITY_QUESTION), weights=(1.0, w),
                                     evaluators="brevity") for w in (0.5, 1.0, 1.5, 2.0)}},
        measures.unexplained, sizes={"tiny": _small(max_steps=60)["tiny"]}, evaluations=5,
        skills=True,
    ),
    "corrections": _experiment(
        "Each correction of plain GRPO is one changed line: what does it change here, for as many "
        "tokens? Those of the ratio stand beside two updates a batch, MaxRL beside accuracy alone.",
        {"plain": PLAIN,
         "no std": _arm("plain", {"scale_rewards": "none"}),
         "batch std": _arm("plain", {"scale_rewards": "batch"}),
         "RLOO": _arm("plain", {"scale_rewards": "none", "baseline": "others"}),
         "REINFORCE++": _arm("plain", {"baseline": "batch"}),
         "accuracy alone": _arm("plain", {"reward_weights": (1, 0)}),
         "MaxRL": _arm("plain", {"reward_weights": (1, 0), "scale_rewards": "mean"}),
         "sequence mean": _arm("plain", {"loss_type": "grpo"}),
         "constant divisor": _arm("plain", {"loss_type": "dr_grpo"}),
         "each reward normalised": _arm("plain", NORMALISED),
         # groups without spread of the weighted sum, as its stored runs resampled them
         "dynamic sampling": _arm(
             "plain", {"dynamic_sampling_rounds": 2, "dynamic_sampling_metric": "reward"}
         ),
         "top-entropy tokens": _arm("plain", {"top_entropy_quantile": 0.2}),
         "KL": _arm("plain", {"beta": 0.04}),
         "KL, long": _arm("plain", {"beta": 0.04, **LONG}),
         "KL, uncorrected, long": _arm("plain", UNCORRECTED | LONG),
         "two updates": _corrected(),
         "clip-higher": _corrected(epsilon_high=0.28),
         "dual clip": _corrected(delta=3.0),
         "GSPO": _corrected(
             importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
         "CISPO": _corrected(loss_type="cispo", epsilon_high=5.0)},
        sizes={"smoke": {"max_generated_tokens": 2_000},
               # where accuracy still rises: later all arms are near the top
               "tiny": WHOLE_TEST | {"max_steps": 200, "max_generated_tokens": 60_000,
                                     "generation_batch_size": 64}},
        x="num_generated_tokens", evaluations=20,
        curves=(),  # of so many arms they cannot be told from one another
    ),
    "engines": _experiment(
        "Does TRL's trainer, given the same config, learn as much as the kit's?",
        {"kit": PLAIN,
         "TRL": dataclasses.replace(_arm("plain", engine="TRL"), train=_trained_by_trl)},
        # in one pass TRL's 64 rows would take 18 GB
        sizes=_small({"max_steps": 6, "per_device_train_batch_size": 16,
                      "gradient_accumulation_steps": 4}, max_steps=40),
        evaluations=4, skills=True,
    ),
    "published": _experiment(
        "Does plain GRPO do for a real model what other codes print of it?",
        {"0.5B": _real("Qwen2.5-0.5B-Instruct", **TWENTY_STEPS),
         "0.5B, LoRA": _real("Qwen2.5-0.5B-Instruct", 32, **TWO_EPOCHS),
         "1.5B, LoRA": _real("Qwen2.5-1.5B-Instruct", 32, **TWO_EPOCHS)},
        measures.on_test_set, evaluations=4,
        changes={"lr_scheduler_type": "constant", "eval_prompts": 200},
    ),
    "flow": _experiment(
        "Does training a planner in the flow raise success, and does it need the advantage of "
        "trajectories, the reward at every turn, and play of its own?",
        {"trajectory": _played(),
         "per turn": _played(per="turn"),
         "final turn only": _played(credit="final"),
         "two updates, KL": _played(changes={"num_iterations": 2, "beta": 0.01}),
         "judged outcome": dataclasses.replace(
             _played(changes={"reward_weights": (0, 1)}), rewards=_outcome_judged),
         "offline traces": _played(OfflineTraces)},
        measures.played, watch=measures.watch_episodes, show=measures.episodes_to_read,
        task=tool_questions,
        sizes={"smoke": FEW_EPISODES, "paper": AGENTFLOW,
               **_small({"max_steps": 6, "generation_batch_size": 32, "eval_prompts": 0,
                         "eval_prompts_between": 24}, max_steps=24, learning_rate=3e-4,
                        max_completion_length=48, eval_prompts=0, eval_prompts_between=64)},
        changes={"loss_type": "grpo", "eval_prompts": 0}, evaluations=3, evaluator=2, skills=True,
        curves=("reward", "eval/pass@1", "eval/turns", "eval/tool_errors"),
    ),
}  # fmt: skip


def load_current(
    results: str | Path | None = None, profile: str = "*", experiment: str = "*"
) -> tuple[list[Record], list[str]]:
    """`records.load` of the runs that this version makes like this, and why others are left out."""
    records, problems = load(results, profile, experiment)
    current = []
    for record in records:
        name, where = record.experiment, record.profile
        if name == NOTEBOOKS:
            continue
        why = "there is no such experiment or profile any more."
        if name in EXPERIMENTS and where in PROFILES:
            why = outdated(record, EXPERIMENTS[name], PROFILES[where])
        if why:
            runs = f"runs of {name!r}, {record.arm!r}, profile {where!r}, are left out"
            problems.append(f"{runs}: {why} `{command_of(name, where)}` makes them again.")
        else:
            current.append(record)
    return current, list(dict.fromkeys(problems))  # a sentence an arm, not a run
