"""Read the log of a GRPO run, ours, TRL's or a CSV, and say what is healthy and what is not.

`CHECKS` is the table of what is looked for; `diagnose` goes through it. Only numbers are needed: no
model, no data. A loss near 0 is healthy (it is 0 where a batch is on-policy), so the loss is only
checked for NaN. By these limits no stored run of ours that learnt is sick (a test says so).
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from textwrap import fill, indent
from typing import NamedTuple

from grpo_kit.runs import HISTORY, value_of

TRAINER_STATE = "trainer_state.json"
LENGTH = "completions/mean_length"
ALIASES = {"global_step": "step", "_step": "step", "completion_length": LENGTH}
HELD_OUT = ("eval/pass@1", "eval_rewards/accuracy_reward/mean", "eval_reward", "eval/reward")
MISMATCH = "sampling/sampling_logp_difference/mean"
LENIENT = "eval/lenient/pass@1"
FALL = 0.15  # of accuracy, from which it has fallen
FEWEST = 4  # steps, without which nothing can be said


class Finding(NamedTuple):
    """What a check found; `steps`: the first and the last that show it."""

    id: str
    severity: str  # "sick", "warning" or "note"
    steps: tuple[int, int]
    evidence: str
    advice: str


def read_log(path: str | Path) -> list[dict]:
    """Read the rows of a run, one dict of metrics per step.

    path: our run's folder or `history.jsonl`; TRL's output folder or `trainer_state.json`; a CSV of
    metrics with TRL's names. ValueError where it is none of these.
    """
    file = _log_in(Path(path))
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".csv":
            rows: list = list(csv.DictReader(text.splitlines()))
        elif file.suffix == ".jsonl":
            *whole, last = text.split("\n")
            rows = [json.loads(line) for line in whole if line.strip()]
            with suppress(ValueError):  # a run that was killed may have cut its last line
                rows.append(json.loads(last))
        else:
            rows = json.loads(text)["log_history"]
        rows = [_row(row, i) for i, row in enumerate(rows)]
        if not any({"reward", "loss", "grad_norm", "entropy"} & row.keys() for row in rows):
            raise ValueError("it has no metric of a GRPO run, such as reward")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wanted = f"{HISTORY}, {TRAINER_STATE}, or a CSV with TRL's names of metrics"
        raise ValueError(f"{file} is no log that can be read ({error}): give {wanted}.") from error
    return rows


def _log_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"checkpoint-*/{TRAINER_STATE}"), key=lambda p: p.stat().st_mtime)
    for file in (path / HISTORY, path / TRAINER_STATE, *found[::-1]):
        if file.is_file():
            return file
    raise ValueError(f"{path} holds neither {HISTORY} nor {TRAINER_STATE}: give a run's folder.")


def _row(row: dict, number: int) -> dict:
    """Return the row with TRL's present names and with floats; other values are left out."""
    known = {"step": number}
    for name, value in row.items():
        name = name.removeprefix("train/")
        with suppress(TypeError, ValueError, OverflowError):
            known[ALIASES.get(name, name)] = float(value)
    if not math.isfinite(known["step"]):
        known["step"] = number
    return known


# --- conditions: of a run's rows the severity, the steps and numbers for a sentence, or None ------

Found = tuple[str, Sequence[int], dict] | None


def series(rows: Sequence[dict], *names: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the first of these metrics that was logged."""
    for name in names:
        pairs = [(int(row["step"]), value_of(row, name)) for row in rows]
        if pairs := [(step, value) for step, value in pairs if value is not None]:
            return [step for step, _ in pairs], [value for _, value in pairs]
    return [], []


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last quarter; NaN for too few finite values."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < FEWEST:
        return math.nan, math.nan
    quarter = len(values) // 4
    return fmean(values[:quarter]), fmean(values[-quarter:])


def often(name: str, sick: Callable, share: float = 0.0, fewest: int = 1):
    """The metric is `sick` in this share of the steps, and in the fewest."""

    def condition(rows: Sequence[dict]) -> Found:
        steps, values = series(rows, name)
        found = [step for step, value in zip(steps, values, strict=True) if sick(value)]
        if len(found) < max(fewest, share * len(steps)):
            return None
        return "sick", found, {"name": name, "n": len(found), "of": len(steps)}

    return condition


def change(name: str, sick: Callable, warning: Callable = lambda first, last: False):
    """The means of a metric's first and of its last quarter are as `sick` or `warning`."""

    def condition(rows: Sequence[dict]) -> Found:
        steps, values = series(rows, name)
        first, last = ends(values)
        if not (sick(first, last) or warning(first, last)):
            return None
        severity = "sick" if sick(first, last) else "warning"
        return severity, steps, {"first": first, "last": last}

    return condition


def not_finite(rows: Sequence[dict]) -> Found:
    for name in ("loss", "grad_norm", "kl", "entropy", "reward"):
        if found := often(name, lambda value: not math.isfinite(value))(rows):
            return found
    return None


def no_spread(rows: Sequence[dict]) -> Found:
    """All groups agree: a note where they do since the reward rose."""
    steps, shares = series(rows, "frac_reward_zero_std")
    first, last = ends(shares)
    if len(shares) < FEWEST or max(last, fmean(shares)) < 0.9:
        return None
    agreed = {step for step, share in zip(steps, shares, strict=True) if share == 1}
    norms = [norm for step, norm in zip(*series(rows, "grad_norm"), strict=True) if step in agreed]
    if norms and median(norms) > 1e-6 and not series(rows, "kl")[0]:
        return None  # another source of advantages than groups, as with baseline="batch"
    before, after = ends(series(rows, "reward")[1])
    severity = "note" if first < 0.5 and after > before else "sick"
    return severity, steps, {"first": first, "last": last}


def flat(rows: Sequence[dict]) -> Found:
    steps, rewards = series(rows, "reward")
    first, last = ends(rewards)
    lowest = min((reward for reward in rewards if math.isfinite(reward)), default=0.0)
    stays = sum(reward - lowest < 1e-6 for reward in rewards)
    if not (2 * stays > len(rewards) and last <= first + 1e-6):
        return None
    return "sick", steps, {"lowest": lowest, "n": stays, "of": len(rewards)}


def form_lost(rows: Sequence[dict]) -> Found:
    """Strict accuracy fell, and lenient accuracy, which reads untagged answers too, did not."""
    _, lenient = series(rows, LENIENT)
    found = lenient and falls(rows, *HELD_OUT)
    if not found or falls(rows, LENIENT):
        return None
    severity, steps, numbers = found
    return severity, steps, numbers | {"lenient": lenient[-1]}


def held_out_falls(rows: Sequence[dict]) -> Found:
    """Held-out accuracy fell, by the lenient grading where it was logged."""
    return falls(rows, LENIENT, *HELD_OUT)


def falls(rows: Sequence[dict], *names: str) -> Found:
    """The first of these accuracies that was logged fell since its best; the reward did not."""
    steps, accuracy = series(rows, *names)
    if len(accuracy) < 3:
        return None
    best = max(range(len(accuracy)), key=accuracy.__getitem__)
    at, rewards = series(rows, "reward")
    late = [reward for step, reward in zip(at, rewards, strict=True) if step > steps[best]]
    if accuracy[best] - accuracy[-1] < FALL or not late:
        return None
    early = rewards[: -len(late)][-max(1, len(late) // 2) :] or rewards[:1]
    if fmean(late[len(late) // 2 :]) < fmean(early):
        return None
    return "sick", steps[best:], {"best": accuracy[best], "at": steps[best], "last": accuracy[-1]}


def no_gradient(rows: Sequence[dict]) -> Found:
    """The gradient is 0 in most steps with spread; without spread none is to be expected."""
    spread = dict(zip(*series(rows, "frac_reward_zero_std"), strict=True))
    rows = [row for row in rows if spread.get(row["step"], 1.0) < 0.9]
    return often("grad_norm", lambda norm: norm < 1e-6, share=0.5, fewest=2)(rows)


CHECKS = (  # name, condition, what it says, what to try
    ("not-finite", not_finite,
     "{name} is not a finite number in {n} of {of} steps",
     "Go back to the last good checkpoint; check rewards, learning rate, and float16's overflow."),
    ("unscored", change("frac_unscored", lambda a, b: b >= 0.5, lambda a, b: b >= 0.1),
     "at the end {last:.0%} of the completions have no reward",
     "Look at what the reward returns or raises, and at the judge's failures (notebook 03)."),
    ("no-spread", no_spread,
     "{last:.0%} of the groups have no spread at the end, {first:.0%} at the start",
     "Where all answers of a group earn the same, no advantage is left: take problems that are "
     "solved sometimes, larger groups, a warm-up, or dynamic sampling (01b)."),
    ("flat-reward", flat,
     "the reward is {lowest:.3g}, its lowest, in {n} of {of} steps",
     "Read ten answers and their rewards. Is the right form never tried (notebook 01)?"),
    ("reward-without-held-out", held_out_falls,
     "held-out accuracy falls from {best:.3g} at step {at} to {last:.3g}, the reward does not",
     "The policy pleases the reward and no longer solves the task. Stop at the best held-out step, "
     "look for what the reward overlooks, add a rule or a KL term (notebooks 03 and 05)."),
    ("form-lost", form_lost,
     "held-out accuracy falls from {best:.3g} at step {at} to {last:.3g}; graded leniently, tagged "
     "or not, it is {lenient:.3g}",
     "The answers are as right as before, and no longer marked. Pay for the format (notebook 05)."),
    ("clipped", change("completions/clipped_ratio", lambda a, b: b >= 0.9, lambda a, b: b >= 0.3),
     "at the end {last:.0%} of the completions are cut off",
     "Raise max_completion_length, see whether prompts are messages (text gets no template), and "
     "whether the end-of-turn token is among eos_token_ids and in the loss mask (pad = eos hides "
     "it)."),
    ("sampler-mismatch", change(MISMATCH, lambda a, b: b >= 0.3, lambda a, b: b >= 0.1),
     "sampler and trainer differ by {last:.2g} nats per token at the end",
     "Compare weights, precision, temperature and token masks of both (notebook 08)."),
    ("kl-explosion", change("kl", lambda a, b: b > max(1, 10 * a)),
     "kl goes from {first:.2g} to {last:.3g}",
     "Lower the learning rate, clip the gradient, check that both models read the same tokens."),
    ("entropy-collapse", change("entropy", lambda a, b: b < 0.03 * a, lambda a, b: b < 0.1 * a),
     "entropy goes from {first:.3g} to {last:.3g} nats per token",
     "Try a lower learning rate, clip-higher, a higher temperature, a diversity reward."),
    ("entropy-explosion", change("entropy", lambda a, b: b > max(3 * a, a + 1)),
     "entropy goes from {first:.3g} to {last:.3g} nats per token",
     "Lower the learning rate, look for advantages that are not normalised, or not clipped."),
    ("length-collapse", change(LENGTH, lambda a, b: b < max(0.25 * a, min(3, 0.5 * a))),
     "completions go from {first:.1f} to {last:.1f} tokens",
     "Does the reward pay a very short answer, or a missing one like a wrong one (notebook 03)?"),
    ("no-learning-rate", often("learning_rate", lambda rate: rate <= 0, share=0.9, fewest=FEWEST),
     "the learning rate is 0 in {n} of {of} steps", "Look at the schedule, and at what was set."),
    ("vanishing-gradient", no_gradient,
     "the gradient's norm is 0 in {n} of {of} steps with spread",
     "Are the trained weights frozen, is every token masked, is the rate too low for LoRA?"),
)  # fmt: skip


def diagnose(rows: Iterable[dict]) -> list[Finding]:
    """Return what a run's rows (of `Run.history` or `read_log`) show, what is sick first."""
    rows, findings = [_row(row, i) for i, row in enumerate(rows)], []
    for name, condition, says, advice in CHECKS:
        if found := condition(rows):
            severity, steps, numbers = found
            shown = (steps[0], steps[-1]), says.format(**numbers)
            findings.append(Finding(name, severity, *shown, advice))
    return sorted(findings, key=lambda finding: finding.severity != "sick")


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.severity != "sick" for finding in findings)


def in_words(findings: Sequence[Finding], rows: Sequence[dict]) -> str:
    """Return the diagnosis as plain text."""
    steps = len(series(rows, "reward", "loss")[0])
    few = "" if steps >= FEWEST else f" (too few to say much, at least {FEWEST} are needed)"
    severities = {one.severity for one in findings}
    state = next((name for name in ("sick", "warning") if name in severities), "healthy")
    lines = [f"{state}, by {steps} logged steps{few}"]
    for one in findings:
        lines += ["", f"{one.severity}: {one.id} (steps {one.steps[0]} to {one.steps[1]})"]
        lines += [f"  {one.evidence}", indent(fill(one.advice, 90), "  ")]
    return "\n".join(lines)
