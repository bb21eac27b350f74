"""Read the log of a GRPO run, ours, TRL's or a table, and say what is healthy and what is not.

It needs nothing but the numbers: no model, no data. A loss near 0 is healthy (it is 0 where a batch
is on-policy), so no check reads the loss but for NaN. Limits were set where no stored run of ours
that learnt is called sick: see `tests/course/test_doctor.py`.
"""

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, variance
from textwrap import fill, indent

from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from grpo_kit.runs import HISTORY, value_of
from grpo_kit.visible import visible

TRAINER_STATE = "trainer_state.json"
ALIASES = {  # older names of TRL, and those of exports
    "global_step": "step", "_step": "step", "completion_length": "completions/mean_length",
    "clip_ratio": "clip_ratio/region_mean",
}  # fmt: skip
HELD_OUT = ("eval/pass@1", "eval_rewards/accuracy_reward/mean", "eval_reward", "eval/reward")
SHOWN = ("reward", "held-out", "entropy", "completions/mean_length", "grad_norm", "kl")
SEVERITIES = ("note", "warning", "sick")
FEWEST = 4  # steps, of which something can be said


@dataclass(frozen=True)
class Finding:
    """`steps`: the first and the last that show it; `see`: where the course explains it."""

    id: str
    severity: str  # one of SEVERITIES
    steps: tuple[int, int]
    evidence: str
    advice: str
    see: str


# id -> what to try, and where the course explains it
ADVICE = {
    "no-spread": (
        "Where all answers of a group earn the same, no advantage is left: take problems that are "
        "solved sometimes, more answers a group, a warm-up, or dynamic sampling.",
        "01_basic_grpo, 09_clinic"),
    "flat-reward": (
        "Read ten answers and their rewards. Is pass@k 0, is the right form never tried, does the "
        "reward return what you think, is the learning rate large enough?",
        "01_basic_grpo, 09_clinic"),
    "reward-without-held-out": (
        "The policy pleases the reward and no longer solves the task. Stop at the best held-out "
        "step, look for what the reward overlooks, add a rule, a KL term, or the truth on a part.",
        "03_llm_judge_reward, 05_meta_evaluation, 09_clinic"),
    "clipped": (
        "Answers end at the token limit. Raise max_completion_length, or see whether prompts are "
        "messages: a prompt that is plain text gets no chat template.",
        "01_basic_grpo, 09_clinic"),
    "no-eos": (
        "No answer ever ends by itself. Is the end-of-turn token among eos_token_ids, is it kept "
        "in the loss mask (pad = eos hides it), was it in the warm-up's texts?",
        "01_basic_grpo, 09_clinic"),
    "sampler-mismatch": (
        "Sampler and trainer give the same tokens other probabilities: compare weights, precision, "
        "temperature and token masks; correct by truncated importance sampling meanwhile.",
        "08_scale_out, 09_clinic"),
    "kl-explosion": (
        "The policy runs away from its reference: lower the learning rate, clip the gradient, "
        "check that both read the same tokens; in k3 one unlikely token weighs e^d.",
        "01_basic_grpo, 09_clinic"),
    "entropy-collapse": (
        "The policy always says the same, and groups will lose their spread: a lower learning "
        "rate, clip-higher, a higher temperature, or a reward for diversity.",
        "02_diversity_reward, 09_clinic"),
    "entropy-explosion": (
        "The policy falls apart into noise: lower the learning rate, look for an advantage that "
        "is not normalised, and for negative pushes without a clip.",
        "01_basic_grpo, 09_clinic"),
    "not-finite": (
        "Go back to the last good checkpoint. Look for a log of 0, a standard deviation of 0, an "
        "overflow in float16 (take bfloat16), or a learning rate that is too large.",
        "09_clinic"),
    "length-collapse": (
        "Answers shrink to almost nothing. Does the reward pay an empty or very short answer, and "
        "is a missing answer scored like a wrong one?",
        "03_llm_judge_reward, 09_clinic"),
    "vanishing-gradient": (
        "There is spread in the rewards, but nothing moves. Is the learning rate 0, are the "
        "trained weights frozen, is every token masked or clipped, is LoRA given the rate of full "
        "weights (it wants about ten times as much)?",
        "01_basic_grpo, 09_clinic"),
    "unscored": (
        "Many completions got no reward: look at what the reward returns or raises, and at the "
        "judge's failures (time-outs, replies that cannot be read).",
        "03_llm_judge_reward, 09_clinic"),
}  # fmt: skip


def read_log(path: str | Path) -> list[dict]:
    """The rows of a run, a dict of metrics a step.

    path: our run's folder or `history.jsonl`, or a stored result; TRL's output folder or
    `trainer_state.json`; a CSV of metrics with TRL's names. ValueError where there is none.
    """
    file = _log_in(Path(path))
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".csv":
            rows: list = list(csv.DictReader(io.StringIO(text)))
        elif file.suffix == ".jsonl":
            *whole, last = text.split("\n")
            rows = [json.loads(line) for line in whole if line.strip()]
            with suppress(ValueError):  # a run that was killed may have cut its last line
                rows.append(json.loads(last))
        else:
            content = json.loads(text)
            place = "log_history" if "log_history" in content else "history"
            rows = content if isinstance(content, list) else content[place]
        rows = [_row(row, i) for i, row in enumerate(rows)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wanted = f"{HISTORY}, {TRAINER_STATE}, or a CSV with TRL's names of metrics"
        raise ValueError(f"{file} is no log that can be read ({error}): give {wanted}.") from error
    names = {name for row in rows for name in row} - {"step"}
    if not names & {"reward", "loss", "grad_norm", "entropy"}:
        raise ValueError(f"{file} has no metric of a GRPO run, such as reward: it has "
                         f"{', '.join(sorted(names)[:8]) or 'nothing'}.")  # fmt: skip
    return rows


def _log_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    checkpoints = sorted(
        path.glob(f"checkpoint-*/{TRAINER_STATE}"), key=lambda p: p.stat().st_mtime
    )
    for file in (path / HISTORY, path / TRAINER_STATE, *checkpoints[::-1]):
        if file.is_file():
            return file
    raise ValueError(
        f"{path} holds neither {HISTORY} nor {TRAINER_STATE}: give the folder of a run."
    )


def _row(row: dict, place: int) -> dict:
    """Names as TRL has them now, values as floats; what is no number is left out."""
    known = {"step": place}
    for name, value in row.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        name = ALIASES.get(name := name.removeprefix("train/"), name)
        if name != "step" or math.isfinite(number):
            known[name] = number
    return known


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last quarter; NaN for fewer than `FEWEST` finite values."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < FEWEST:
        return math.nan, math.nan
    quarter = len(values) // 4
    return fmean(values[:quarter]), fmean(values[-quarter:])


class Log:
    """The series of a run's rows."""

    def __init__(self, rows: Sequence[dict]):
        self.rows = rows

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values where the metric was logged."""
        if name == "held-out":
            found = (self.series(held_out) for held_out in HELD_OUT)
            return next((series for series in found if series[0]), ([], []))
        values = [(row["step"], value_of(row, name)) for row in self.rows]
        kept = [(int(step), value) for step, value in values if value is not None]
        return [step for step, _ in kept], [value for _, value in kept]

    def ends(self, name: str) -> tuple[float, float]:
        return ends(self.series(name)[1])

    def where(self, name: str, wanted) -> tuple[list[int], str]:
        """The steps at which a value is as `wanted`, and how often that is, in words."""
        steps, values = self.series(name)
        found = [step for step, value in zip(steps, values, strict=True) if wanted(value)]
        return found, f"in {len(found)} of {len(steps)} steps"


def _finding(name: str, severity: str, steps: Sequence[int], evidence: str) -> Finding:
    return Finding(name, severity, (steps[0], steps[-1]), evidence, *ADVICE[name])


def not_finite(log: Log) -> Finding | None:
    for name in ("loss", "grad_norm", "kl", "entropy"):
        steps, often = log.where(name, lambda value: not math.isfinite(value))
        if steps:
            return _finding("not-finite", "sick", steps, f"{name} is not a finite number {often}")
    steps, often = log.where("reward", math.isinf)  # of NaN see `unscored`
    return _finding("not-finite", "sick", steps, f"reward is infinite {often}") if steps else None


def unscored(log: Log) -> Finding | None:
    rewards = {name for row in log.rows for name in row if name.startswith("rewards/")}
    for name in [*sorted(name for name in rewards if name.endswith("/mean")), "reward"]:
        steps, often = log.where(name, math.isnan)
        if steps:
            return _finding("unscored", "sick", steps, f"{name} is NaN {often}")
    steps, often = log.where("frac_unscored", lambda share: share >= 0.5)
    if len(steps) >= 3:
        evidence = f"half or more of the completions have no reward {often}"
        return _finding("unscored", "sick", steps, evidence)
    share = log.ends("frac_unscored")[1]
    if share >= 0.1:
        evidence = f"at the end {share:.0%} of the completions have no reward"
        return _finding("unscored", "warning", log.series("frac_unscored")[0], evidence)
    return None


def _spread(log: Log) -> tuple[list[int], list[float]]:
    """Of each step, the share of groups without spread; of older logs, whether all are so."""
    steps, shares = log.series("frac_reward_zero_std")
    if shares:
        return steps, shares
    steps, deviations = log.series("reward_std")
    return steps, [float(deviation < 1e-8) for deviation in deviations]


def no_spread(log: Log) -> Finding | None:
    steps, shares = _spread(log)
    if len(shares) < FEWEST:
        return None
    first, last = ends(shares)
    if max(last, fmean(shares)) < 0.9:
        return None
    evidence = f"{last:.0%} of the groups have no spread at the end, {first:.0%} at the start"
    before, after = log.ends("reward")
    if first < 0.5 and after > before:  # the rest is solved
        return _finding(
            "no-spread", "note", steps[-(len(steps) // 4) :], f"{evidence}; the reward rose"
        )
    return _finding("no-spread", "sick", steps, evidence)


def flat_reward(log: Log) -> Finding | None:
    steps, rewards = log.series("reward")
    rewards = [reward for reward in rewards if math.isfinite(reward)]
    if len(rewards) < FEWEST:
        return None
    quarter, lowest = len(rewards) // 4, min(rewards)
    first, last = log.ends("reward")
    stays = sum(reward - lowest < 1e-6 for reward in rewards)
    if 2 * stays > len(rewards) and last <= first + 1e-6:
        evidence = f"the reward is {lowest:.3g}, its lowest, in {stays} of {len(rewards)} steps"
        return _finding("flat-reward", "sick", steps, evidence)
    if quarter < 8:
        return None
    parts = (rewards[:quarter], rewards[-quarter:])
    error = math.sqrt(sum(variance(part) / quarter for part in parts))
    if last > first + error or min(_spread(log)[1], default=0) > 0.5:
        return None
    evidence = f"the reward goes from {first:.3g} to {last:.3g} in {len(rewards)} steps"
    return _finding("flat-reward", "warning", steps, evidence)


def reward_without_held_out(log: Log) -> Finding | None:
    steps, accuracies = log.series("held-out")
    at, rewards = log.series("reward")
    if len(accuracies) < 3 or not rewards:
        return None
    best = max(range(len(accuracies)), key=accuracies.__getitem__)
    fell = accuracies[best] - accuracies[-1]
    late = [r for step, r in zip(at, rewards, strict=True) if step > steps[best]]
    early = [r for step, r in zip(at, rewards, strict=True) if step <= steps[best]]
    near = early[-max(1, len(late) // 2) :] or rewards[:1]
    if fell < 0.08 or not late or fmean(late[len(late) // 2 :]) < fmean(near):
        return None
    evidence = (
        f"held-out accuracy falls from {accuracies[best]:.3g} at step {steps[best]} to "
        f"{accuracies[-1]:.3g}, the reward goes from {fmean(near):.3g} to "
        f"{fmean(late[len(late) // 2 :]):.3g}"
    )
    severity = "sick" if fell >= 0.15 else "warning"
    return _finding("reward-without-held-out", severity, steps[best:], evidence)


def clipped(log: Log) -> Finding | None:
    name = "completions/clipped_ratio"
    steps, often = log.where(name, lambda share: share >= 0.9)
    if steps and 2 * len(steps) >= len(log.series(name)[0]):
        evidence = f"nine in ten completions or more are cut off {often}"
        return _finding("clipped", "sick", steps, evidence)
    if (last := log.ends(name)[1]) >= 0.3:
        evidence = f"at the end {last:.0%} of the completions are cut off"
        return _finding("clipped", "warning", log.series(name)[0], evidence)
    return None


def no_eos(log: Log) -> Finding | None:
    steps, shares = log.series("completions/clipped_ratio")
    if len(shares) < 2 or min(shares) < 0.95:
        return None
    evidence = (
        f"in all {len(steps)} steps at least {min(shares):.0%} of the completions did not end"
    )
    return _finding("no-eos", "sick", steps, evidence)


def sampler_mismatch(log: Log) -> Finding | None:
    name = "sampling/sampling_logp_difference/mean"
    steps, values = log.series(name)
    if not values:
        return None
    apart, entropies = fmean(values), log.series("entropy")[1]
    usual = fmean(entropies) if entropies else 0.3  # nats a token; the more, the more can differ
    if apart < 0.05 or apart < 0.25 * usual:
        return None
    evidence = f"the two differ by {apart:.2g} nats per token, at an entropy of {usual:.2g}"
    return _finding("sampler-mismatch", "sick" if apart >= usual else "warning", steps, evidence)


def kl_explosion(log: Log) -> Finding | None:
    steps, values = log.series("kl")
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < FEWEST:
        return None
    usual, largest = median(finite[: len(finite) // 2]), max(finite)
    where, often = log.where("kl", lambda value: value > max(1.0, 10 * usual))
    if not where:
        return None
    evidence = f"kl reaches {largest:.3g}; its median over the first half is {usual:.2g}, "
    severity = "sick" if largest > 10 or log.ends("kl")[1] > 1 else "warning"
    return _finding(
        "kl-explosion", severity, where, evidence + f"and ten times that is passed {often}"
    )


def entropy_drift(log: Log) -> Finding | None:
    steps = log.series("entropy")[0]
    first, last = log.ends("entropy")
    evidence = f"entropy goes from {first:.3g} to {last:.3g} nats per token"
    if last < 0.1 * first:
        severity = "sick" if last < 0.03 * first else "warning"
        return _finding("entropy-collapse", severity, steps, evidence)
    if last > 3 * first and last - first > 0.3:
        severity = "sick" if last - first > 1 else "warning"
        return _finding("entropy-explosion", severity, steps, evidence)
    return None


def length_collapse(log: Log) -> Finding | None:
    name = "completions/mean_length"
    first, last = log.ends(name)
    if not last < 0.5 * first:
        return None
    evidence = f"completions go from {first:.1f} to {last:.1f} tokens"
    severity = "sick" if last < 0.25 * first or last < 3 else "warning"
    return _finding("length-collapse", severity, log.series(name)[0], evidence)


def vanishing_gradient(log: Log) -> Finding | None:
    rates, often = log.where("learning_rate", lambda rate: rate <= 0)
    if rates and len(rates) >= max(FEWEST, 0.9 * len(log.series("learning_rate")[0])):
        return _finding("vanishing-gradient", "sick", rates, f"the learning rate is 0 {often}")
    spread = dict(zip(*_spread(log), strict=True))  # without spread there is no gradient to expect
    steps, norms = log.series("grad_norm")
    expected = [(s, n) for s, n in zip(steps, norms, strict=True) if spread.get(s, 1.0) < 0.9]
    gone = [step for step, norm in expected if norm < 1e-6]
    if len(expected) < FEWEST or 2 * len(gone) < len(expected):
        return None
    evidence = f"the gradient's norm is 0 in {len(gone)} of {len(expected)} steps with spread"
    return _finding("vanishing-gradient", "sick", gone, evidence)


CHECKS = (
    not_finite, unscored, no_spread, flat_reward, reward_without_held_out, clipped, no_eos,
    sampler_mismatch, kl_explosion, entropy_drift, length_collapse, vanishing_gradient,
)  # fmt: skip


def diagnose(rows: Iterable[dict]) -> list[Finding]:
    """What a run's rows show, the worst first. `rows`: as `Run.history` or `read_log` has them."""
    log = Log([_row(row, i) for i, row in enumerate(rows)])
    findings = [finding for check in CHECKS if (finding := check(log))]
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.severity != "sick" for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict:
    return {"healthy": is_healthy(findings), "findings": [asdict(one) for one in findings]}


def in_words(findings: Sequence[Finding], rows: Sequence[dict]) -> str:
    """The diagnosis as plain text."""
    steps = Log(rows).series("reward")[0] or Log(rows).series("loss")[0]
    verdict = "healthy" if is_healthy(findings) else "sick"
    if (warnings := len(findings)) and verdict == "healthy":
        verdict += f", with {warnings} thing{'s' * (warnings > 1)} to look at"
    lines = [f"{verdict}, by {len(steps)} logged steps"]
    if len(steps) < FEWEST:
        lines.append(f"too few to say much: at least {FEWEST} are needed")
    for one in findings:
        first, last = one.steps
        lines += ["", f"{one.severity}: {one.id} (steps {first} to {last})", f"  {one.evidence}"]
        lines += [indent(fill(one.advice, 90), "  "), f"  see {one.see}"]
    return "\n".join(lines)


def page(findings: Sequence[Finding], rows: Sequence[dict], name: str) -> str:
    """The diagnosis as one HTML page without scripts, with the run's curves."""
    verdict = "healthy" if is_healthy(findings) else "sick"
    buffer = io.BytesIO()
    if figure := curves(findings, rows):
        figure.savefig(buffer, format="png", dpi=120)
    png = base64.b64encode(buffer.getvalue()).decode()
    shown = {"title": visible(f"{name}: {verdict}"), "findings": findings, "png": png}
    loader = PackageLoader("grpo_kit.course")
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True)
    return visible(templates.get_template("doctor.html.j2").render(shown), newline="\n")


def curves(findings: Sequence[Finding], rows: Sequence[dict]) -> Figure | None:
    """The run's metrics by step, the steps of what is sick shaded; None where none is known."""
    log = Log(rows)
    shown = [(name, *log.series(name)) for name in SHOWN if log.series(name)[0]]
    if not shown:
        return None
    figure = Figure(figsize=(10, 2.4 * math.ceil(len(shown) / 3)), layout="constrained")
    panels = figure.subplots(math.ceil(len(shown) / 3), min(3, len(shown)), squeeze=False).flat
    for (name, steps, values), axes in zip(shown, panels, strict=False):
        axes.plot(steps, values, color="#0072b2")
        axes.set(title=name, xlabel="step")
        for one in findings:
            if one.severity == "sick":
                axes.axvspan(*one.steps, color="#d55e00", alpha=0.08)
    for axes in list(panels):
        axes.set_visible(False)
    return figure
