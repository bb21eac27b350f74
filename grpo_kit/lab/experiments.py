"""The experiments by name, `data/experiments.yaml`: how an entry becomes arms that can be trained.

A stored run belongs to an arm by config and `options` (`Experiment.identity`): to change one, or to
rename a function that the options name, makes its runs outdated.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from grpo_kit import self_verification as verification
from grpo_kit.config import GRPOConfig
from grpo_kit.flow import FlowGRPO, OfflineTraces
from grpo_kit.lab import measures, surrogates
from grpo_kit.lab.grid import Arm, Experiment, command_of, outdated
from grpo_kit.lab.records import NOTEBOOKS, Record, load
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES, Profile
from grpo_kit.rewards import (
    CertaintyReward,
    DiversityReward,
    MajorityReward,
    QualityJudgeReward,
    random_reward,
)
from grpo_kit.rewards.diversity import load_embedder
from grpo_kit.rewards.meta_evaluation import STEPS_QUESTION, MetaEvaluationReward
from grpo_kit.rewards.rules import accuracy_reward, format_reward
from grpo_kit.runs import Run
from grpo_kit.tasks.answers import extract_answer, is_correct
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.tasks.word_problems import two_then_three
from grpo_kit.tiny.pretrain import BREVITY_STEPS, warm_up_more
from grpo_kit.training import PromptBatches, train
from grpo_kit.warm_up import RECIPES, GivenTexts, take_replies

# --- rewards --------------------------------------------------------------------------------------


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
    if kind == "plain and random":
        rewards.append(random_reward)
    if kind == "plain and overlong":
        rewards.append(_overlong(**options))
    if "judge" in kind:
        rewards.append(QualityJudgeReward(profile.load_judge(policy), **options))
    if kind == "plain, judge, P(Yes)":
        rewards.append(MetaEvaluationReward(frozen_copy(policy), STEPS_QUESTION, transform="p"))
    return rewards


def _paid_to_neighbours(rewards: Callable, profile: Profile, config, policy) -> list[Callable]:
    *others, last = rewards(profile, config, policy)
    return [*others, of_neighbour(last, config.num_generations)]


def of_neighbour(reward: Callable, num_generations: int) -> Callable:
    """A control: each answer is paid what another of its group earns, and in turn its own.

    What is paid varies as `reward` does in every group, and on average favours no answer.
    """

    def paid(*, trainer_state, **columns) -> list[float | None]:
        earned, n = reward(trainer_state=trainer_state, **columns), num_generations
        by = trainer_state.global_step % n
        groups = (earned[i : i + n] for i in range(0, len(earned), n))
        return [value for group in groups for value in group[n - by :] + group[: n - by]]

    paid.__name__ = f"neighbour_{reward.__name__}"
    return paid


def _overlong(longest: int, cache: int) -> Callable:
    """DAPO's soft penalty of long answers (arXiv 2503.14476, eq. 13), by TRL's function."""
    from trl.rewards import get_soft_overlong_punishment  # takes a second, see `_trained_by_trl`

    return get_soft_overlong_punishment(longest, cache)


def read_truth(text: str, answer: str) -> float:
    """P("Yes") of an evaluator that compares with the reference as `accuracy_reward` does."""
    return 0.98 if is_correct(extract_answer(text), answer) else 0.02


def _meta_evaluation(
    profile: Profile, policy: Policy, *, question: str | Sequence[str], evaluators: str, **options
) -> MetaEvaluationReward:
    """Shown a truth, the evaluator reads it; the tiny world's needs `read_truth` to compare it.

    `evaluators`: "frozen", the policy as it is now; "live", as it becomes; "_ensemble", frozen and
    two after more of the base's warm-up, or frozen and live; "brevity", the base once it has been
    taught to say whether an answer is short.
    """
    tiny = profile.policy == "tiny-base"
    match evaluators:
        case "live":
            chosen = [policy]
        case "brevity" if tiny:
            chosen = [_taught_brevity()]
        case "brevity":
            raise ValueError('"brevity" is an evaluator of the tiny world: choose another.')
        case "_ensemble":
            more = (warm_up_more(profile.load_policy(), seed) for seed in (1, 2))
            chosen = [frozen_copy(policy), *(more if tiny else [policy])]
        case _:
            chosen = [frozen_copy(policy)]
    reader = read_truth if profile.judge == "tiny" else None
    return MetaEvaluationReward(chosen, question, truth_reader=reader, **options)


@cache
def _taught_brevity() -> Policy:
    """One for all runs of a process. Half as many steps left it unsure which answer is shorter."""
    return warm_up_more(PROFILES["tiny"].load_policy(), 1, BREVITY_STEPS, "brevity")


def _outcome(judged: bool, profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    """An episode's reward: accuracy, and if `judged`, what a copy thinks that sees the answer."""
    if not judged:
        return [accuracy_reward]
    judge = MetaEvaluationReward(frozen_copy(policy), transform="p", truth_fraction=1.0)
    return [accuracy_reward, judge]


# --- batch sources and trainers -------------------------------------------------------------------


# `post_process` without a stage each; the names of these functions are hashed.
def unfiltered(items: Sequence, seed: int, n: int) -> list:
    return verification.balance(*verification.diversify(items, seed), n, seed)


def undiversified(items: Sequence, seed: int, n: int) -> list:
    return verification.balance(verification.filter_queries(items, seed), [], n, seed)


def unbalanced(items: Sequence, seed: int, n: int) -> list:
    chosen, filler = verification.diversify(verification.filter_queries(items, seed), seed)
    pool = chosen + filler
    return random.Random(seed).sample(pool, min(n, len(pool)))


def unprocessed(items: Sequence, seed: int, n: int) -> list:
    return random.Random(seed).sample(items, min(n, len(items)))


STAGES = (verification.post_process, unfiltered, undiversified, unbalanced, unprocessed)
POST_PROCESSES = {process.__name__: process for process in STAGES}
COLLECTORS = {"FlowGRPO": FlowGRPO, "OfflineTraces": OfflineTraces}


VERDICTS_PAID = {"by label": None, "random": random_reward}  # a coin for each verdict, a control


def _verdicts(strategy: str, post_process: str, reward: Any, profile: Profile) -> Callable:
    options = {"post_process": POST_PROCESSES[post_process], "reward": reward}
    return partial(verification.SelfVerification, strategy=strategy, **options)


def _episodes(collector: str, options: Mapping, profile: Profile) -> Callable:
    source = COLLECTORS[collector]
    return lambda prompts: source(prompts, profile.load_agents(prompts.policy), **options)


def _more_texts(profile: Profile) -> Callable:
    """The warm-up goes on, with texts of the profile's task."""
    texts = RECIPES["svamp" if profile.task == "svamp" else "skills"].texts

    def source(prompts: PromptBatches) -> GivenTexts:
        config, rng = prompts.config, random.Random(f"more-{prompts.seed}")
        count = config.max_steps * config.generation_batch_size
        return GivenTexts(prompts, take_replies(prompts.policy, texts(rng), count))

    return source


def _trained_by_trl(*arguments, **options) -> Run:
    from grpo_kit import trl_bridge  # takes seconds, and the other arms do not need it

    return trl_bridge.train(*arguments, **options)


# --- entries --------------------------------------------------------------------------------------


def arm_of(entry: Mapping[str, Any]) -> Arm:
    """An arm as `data/experiments.yaml` describes it."""
    options = dict(entry)
    own = {"changes": options.pop("config", {}), "profile": options.pop("profile", {})}
    judged = options.pop("outcome", "") == "judged"
    own["options"] = dict(options)
    match options:
        case {"strategy": strategy, "post_process": process}:
            paid = VERDICTS_PAID[options.get("verdicts", "by label")]
            own["batch_source"] = partial(_verdicts, strategy, process, paid)
        case {"collector": collector, **arguments}:
            own["batch_source"] = partial(_episodes, collector, arguments)
            return Arm(partial(_outcome, judged), **own)
        case {"texts": _}:
            own["batch_source"] = _more_texts
        case {"engine": _}:
            own["train"] = _trained_by_trl
        case {"surrogate": name}:
            own["train"] = partial(train, surrogate=getattr(surrogates, name))
    kind = options.pop("rewards", "plain")
    arguments = {name: value for name, value in options.items() if name not in SOURCES}
    if kind not in KINDS:
        raise ValueError(f"rewards are {kind!r}: choose among {'; '.join(KINDS)}.")
    if arguments and kind == "plain":
        raise ValueError(f"nothing takes {', '.join(arguments)}; the config's go under `config`.")
    paid = arguments.pop("paid", "its own")
    rewards = partial(_rewards, kind, arguments)
    if paid == "neighbour's":
        rewards = partial(_paid_to_neighbours, rewards)
    elif paid != "its own":
        raise ValueError(f"paid is {paid!r}: choose neighbour's, or leave it out.")
    return Arm(rewards, **own)


def at(entry: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of an arm in a setting: fields of the config, or `shares` of the tiny world."""
    setting = dict(setting)
    profile = {"shares": setting.pop("shares")} if "shares" in setting else {}
    return {
        **entry,
        "config": {**entry.get("config", {}), **setting},
        "profile": {**entry.get("profile", {}), **profile},
    }


KINDS = ("plain", "plain and diversity", "plain and judge", "plain and P(Yes)",
         "plain, judge, P(Yes)", "plain and majority", "plain and certainty", "plain and random",
         "plain and overlong")  # fmt: skip
# no reward takes these
SOURCES = ("strategy", "post_process", "verdicts", "texts", "engine", "surrogate")
TASKS = {"tool_questions": tool_questions, "two_then_three": two_then_three}


def experiment_of(entry: Mapping[str, Any]) -> Experiment:
    """An experiment as `data/experiments.yaml` describes it; functions are those of `measures`."""
    fields = dict(entry)
    arms, settings = fields["arms"], fields.get("settings", {})
    if settings:
        arms = {
            f"{name}, {label}": at(arm, setting)
            for name, arm in arms.items()
            for label, setting in settings.items()
        }
        fields["curves"] = ()  # of so many arms they cannot be told from one another
    fields["settings"] = list(settings)
    fields["arms"] = {name: arm_of(arm) for name, arm in arms.items()}
    fields["changes"] = fields.pop("config", {})
    functions = [getattr(measures, name) for name in fields.pop("measure", [])]
    fields["measure"] = partial(measures.together, functions)
    fields["show"] = getattr(measures, fields.get("show", "answers_to_read"))
    if "watch" in fields:
        fields["watch"] = getattr(measures, fields["watch"])
    if "task" in fields:
        fields["task"] = TASKS[fields["task"]]
    return Experiment(**fields)


def read_experiments(path: Path) -> dict[str, Experiment]:
    """The experiments of a file; names like `.arms` only hold what entries share.

    Raises ValueError, naming the entry, for one that cannot be used.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    experiments = {}
    for name, entry in entries.items():
        try:
            if not name.startswith("."):
                experiments[name] = experiment_of(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"experiment {name!r} in {path.name}: {error}") from error
    return experiments


EXPERIMENTS = read_experiments(data_dir() / "experiments.yaml")


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
