"""Does my change help? `compare` trains arms from one start, seed by seed, and judges them."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_kit import hooks
from grpo_kit.course.plots import arm_bands
from grpo_kit.lab import grid
from grpo_kit.lab.grid import Arm, Experiment
from grpo_kit.lab.identity import identity_of
from grpo_kit.lab.records import Record
from grpo_kit.lab.statistics import DELTA, MIN_SEEDS, Judgement, half_width, judge
from grpo_kit.lab.summary import cell, markdown_table, number, summarise
from grpo_kit.paths import writing
from grpo_kit.profiles import PROFILES, Profile
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.rewards.scoring import check_rewards
from grpo_kit.training import check_task, have_answers, train

FUNCTIONS = ("advantages", "surrogate", "aggregate", "batch_source")
VERDICTS = {"reproduced": "better", "contradicted": "worse", "no effect": "no difference"}
RULE = (
    "*better* or *worse*: the interval of the mean difference, paired by seed, lies on one side of "
    "0. *no difference*: it lies within ± {delta:g}. *inconclusive*: neither, or fewer than "
    f"{MIN_SEEDS} seeds. Together, all intervals hold with a chance of 95 %."
)
LENIENT = "eval/lenient/pass@1"  # the last number counts, tagged or not
EVALUATED = (
    "pass@",
    "greedy",
    "lenient/",
    "mean_length",
)  # as tables show them
MOST_SEEDS = 200  # that are worth naming
UNEVEN = {"tokens": 1.1, "seconds": 1.25}  # ratios of costs from which a comparison is unfair


@dataclass(frozen=True)
class Comparison:
    """What the seeds say about each arm beside the first one; printed, it is its table."""

    summary: dict  # see `summarise`
    judged: dict[str, Judgement]  # without the first arm
    metric: str
    delta: float

    @property
    def verdict(self) -> dict[str, str]:
        """Arm -> better, worse, no difference or inconclusive."""
        return {arm: VERDICTS.get(one.verdict, one.verdict) for arm, one in self.judged.items()}

    def table(self) -> str:
        """Markdown: mean, difference, verdict and costs of each arm; the rule; warnings."""
        head = ["arm", self.metric.removeprefix("eval/"), "minus the first", "verdict", *UNEVEN]
        rows, lenient = [], LENIENT if self.metric == "eval/pass@1" else ""
        if lenient in next(iter(self.summary["final"].values())):
            head.insert(2, "lenient")
        for arm, ends in self.summary["final"].items():
            judged = self.judged.get(arm)
            difference = cell(vars(judged), "+") if judged else "–"
            costs = [number(ends[cost]["mean"]) if cost in ends else "–" for cost in UNEVEN]
            values = [cell(ends[name]) for name in (self.metric, lenient) if name in ends]
            rows.append([arm, *values, difference, self._words(arm), *costs])
        seeds = ", ".join(map(str, next(iter(self.summary["seeds"].values()))))
        lines = [f"Seeds {seeds}. {RULE.format(delta=self.delta)}", *self.warnings()]
        if any(" used " in line for line in lines[1:]):
            lines.append("With `max_generated_tokens` in the config all arms end at equal tokens.")
        return markdown_table(head, *rows) + "".join(f"\n{line}\n" for line in lines)

    def _words(self, arm: str) -> str:
        if arm not in self.judged:
            return "the baseline"
        verdict = self.verdict[arm]
        if verdict != "inconclusive":
            return f"**{verdict}**"
        wanted = seeds_to_decide(self.judged[arm], self.delta)
        return f"**{verdict}**, {wanted} fresh seeds of this spread would decide"

    def warnings(self) -> list[str]:
        """Sentences: no arm has learnt; an arm changed nothing; an arm cost much more."""
        (first, least), *others = self.summary["final"].items()
        found, best = [], max(ends[self.metric]["mean"] for ends in self.summary["final"].values())
        if self.metric.startswith("eval/pass@") and best < 2 * self.delta:
            few = f"No arm solves more than {best:.1%}, so there was hardly a right answer to learn"
            found.append(f"{few} from: start from a policy that solves some of the problems.")
        for arm, of in self.summary["difference"].items():
            moved = [name for name in of if name != "seconds" and any(of[name]["values"])]
            if not moved:
                found.append(
                    f"**{arm}** gave the same numbers as **{first}**: its change never acted. A "
                    "clip, for one, acts only where `num_iterations` is above 1."
                )
        for arm, ends in others:
            for cost, uneven in UNEVEN.items():
                if not (cost in ends and cost in least):
                    continue
                ratio = ends[cost]["mean"] / least[cost]["mean"]
                more, fewer = (arm, first) if ratio > 1 else (first, arm)
                if (times := max(ratio, 1 / ratio)) > uneven:
                    used = f"**{more}** used {times:.2g} times the {cost} of **{fewer}**"
                    found.append(f"{used}, which may explain part of the difference.")
        return found

    __repr__ = __str__ = _repr_markdown_ = table

    def plot(self) -> Figure:
        """Curves of all arms: median of the seeds, band from the lowest to the highest."""
        return arm_bands(self.summary["curves"], self.summary["x"])


def seeds_to_decide(judged: Judgement, delta: float) -> str:
    """How many seeds would give a verdict if mean and spread stayed as they are."""
    if judged.n < 2:
        return f"at least {MIN_SEEDS}"
    reach = max(abs(judged.mean), delta - abs(judged.mean))
    for n in range(MIN_SEEDS, MOST_SEEDS + 1):
        if half_width(judged.sd, n, judged.claims) < reach:
            return f"about {n}"
    return f"more than {MOST_SEEDS}"


def compare(
    arms: Mapping[str, Mapping[str, Any]], *, profile: str | Profile = "tiny",
    seeds: Iterable[int] = range(5), metric: str = "eval/pass@1", delta: float = DELTA,
    output_dir: str | Path = "runs/compare", processes: int | None = None,
    correct: Callable = accuracy_reward,
) -> Comparison:  # fmt: skip
    """Train every arm with every seed and judge each arm's `metric` beside the first arm's.

    Finished runs are kept in `output_dir`, so the same call goes on after a kill. A run is made
    anew if a setting of its arm, the data, the model, or the source of a function has changed.

    Args:
        arms: name -> what `train` takes: `rewards`, by default accuracy and format; `advantages`,
            `surrogate`, `aggregate`, `batch_source`; changes to the config as `config`.
        profile: machine, policy, task and config, by name or changed by `with_policy`,
            `with_data`, `with_config`.
        metric: a number of the evaluation at the end, or of the log, where the mean of the last
            steps counts (`Record.late`); more of it is better.
        delta: the smallest difference that matters, in the metric's unit.
        processes: runs at a time, by default one for each core, or one on a GPU.
        correct: the reward by which all arms are evaluated.

    Raises ValueError or TypeError, before any run, for what `train` cannot take, and RuntimeError
    where runs failed.
    """
    chosen = profile if isinstance(profile, Profile) else _known(profile)
    metric = f"eval/{metric}" if metric.startswith(EVALUATED) else metric
    experiment = _experiment(arms, chosen, metric, correct)
    folders = {name: Path(output_dir).resolve() / name for name in ("results", "work")}
    try:
        seeds = list(dict.fromkeys(map(operator.index, seeds)))
    except TypeError:
        raise TypeError(f"seeds are {seeds!r:.80}: give whole numbers, as range(5).") from None
    if not seeds:
        raise ValueError("there are no seeds: give some, such as range(5).")
    if not 0 < delta < math.inf:
        raise ValueError(f"delta is {delta}: give the smallest difference that matters, above 0.")
    if len(seeds) < MIN_SEEDS:
        print(f"{len(seeds)} seeds give no verdict, {MIN_SEEDS} are needed.", flush=True)
    folders["processes"] = processes or grid.usual_processes(chosen)
    with writing(output_dir, "comparison"):
        records = grid.run_grid("compare", experiment, chosen, seeds, **folders)
    summary = summarise([_with(metric, record) for record in records], experiment)
    others = list(summary["final"])[1:]
    table = [(summary["difference"][arm][metric]["values"], "rises", delta) for arm in others]
    return Comparison(summary, dict(zip(others, judge(table), strict=True)), metric, delta)


def _with(metric: str, record: Record) -> Record:
    """The record with `metric` among what was measured at its end."""
    value = record.evaluation.get(metric, record.late(metric))
    if value is None:
        known = ", ".join(sorted({*record.evaluation, *record.history[-1]}))
        raise ValueError(f"the runs of arm {record.arm!r} have no {metric!r}; they have {known}.")
    return replace(record, evaluation=record.evaluation | {metric: value})


def _known(profile: str) -> Profile:
    if profile not in PROFILES:
        raise ValueError(f"there is no profile {profile!r}: choose among {', '.join(PROFILES)}.")
    return PROFILES[profile]


def _experiment(arms: Mapping, profile: Profile, metric: str, correct: Callable) -> Experiment:
    """The arms as an experiment; raises where one cannot be trained."""
    if not isinstance(arms, Mapping) or len(arms) < 2:
        example = 'arms={"plain": {}, "mine": {"rewards": [mine]}}'
        raise ValueError(f"a comparison needs a baseline and another arm, as in {example}.")
    curves = dict.fromkeys((metric, "reward", "entropy", "completions/mean_length"))
    made = {name: _arm(name, entry, correct) for name, entry in arms.items()}
    experiment = Experiment("Which arm is better?", made, curves=tuple(curves))
    task = profile.load_task()
    for name, arm in made.items():
        try:
            config = experiment.setting(profile, name)[1]
            answered = correct is not accuracy_reward or have_answers(task.test)
            if metric.startswith("eval/") and not (config.eval_prompts and answered):
                lacks = f"{metric} is never measured: give test rows with an `answer`"
                raise ValueError(f"{lacks} and eval_prompts above 0, or another metric.")
            given = arms[name].get
            hooks.advantages_by(given("advantages"), config)
            hooks.adds_up(hooks.aggregate_by(given("aggregate"), config))
            hooks.ignores_zero_advantages(hooks.surrogate_by(given("surrogate"), config))
            check_task(task, arm.rewards(), config, correct)
        except (TypeError, ValueError) as error:
            raise type(error)(f"arm {name!r}: {error}") from None
    return experiment


def _arm(name: str, entry: Mapping[str, Any], correct: Callable) -> Arm:
    known = ("rewards", "config", *FUNCTIONS)
    if not isinstance(name, str) or not isinstance(entry, Mapping):
        raise ValueError(f"arm {name!r} is {entry!r:.80}: give a name and a dict.")
    if wrong := [key for key in entry if key not in known]:
        raise ValueError(f"arm {name!r} has {wrong[0]!r}: choose among {', '.join(known)}.")
    rewards = entry.get("rewards", [accuracy_reward, format_reward])
    check_rewards(rewards)
    functions = {kind: entry[kind] for kind in FUNCTIONS if entry.get(kind)}
    for kind in functions:
        hooks.check_hook(kind, functions[kind])
    options = {kind: identity_of(function) for kind, function in functions.items()}
    options["rewards"] = [identity_of(one) for one in rewards]
    if correct is not accuracy_reward:
        functions["correct"], options["correct"] = correct, identity_of(correct)
    changes = entry.get("config", {})
    return Arm(lambda *_: list(rewards), changes, options, train=partial(train, **functions))
