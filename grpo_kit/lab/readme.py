"""Pages of the checkout whose tables are computed from the stored results.

A part between `<!-- name -->` and `<!-- /name -->` is computed; the rest is left as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from grpo_kit.course.plots import arm_bands
from grpo_kit.lab import bench, speedrun
from grpo_kit.lab.claims import claims_text, reported_claims
from grpo_kit.lab.experiments import load_current
from grpo_kit.lab.records import CHECKOUT, NOTEBOOKS, Record, load
from grpo_kit.lab.report import COUNTED, HEADINGS, write_report
from grpo_kit.lab.statistics import power
from grpo_kit.lab.summary import markdown_table, number, reported, summary_text
from grpo_kit.paths import write_atomic

METHODS = {  # curve of the README's picture -> experiment and arm, each with 64 answers a step
    "plain GRPO": ("diversity", "plain"),
    "diversity reward": ("diversity", "diversity"),
    "LLM judge": ("judge", "judge added"),
    "self-verification": ("verification", "mixed"),
    'P("Yes") and format': ("meta", "P(Yes) and format"),
    "Flow-GRPO (tool questions)": ("flow", "trajectory"),
}
MEASURES = ("eval/pass@1", "eval/greedy", "eval/pass@8", "eval/mean_length", "seconds")
FAMILY = 5  # claims, for the table of the rule's power
ACCURACY = ("eval/pass@1", "eval/greedy")
GRADINGS = ("strict", "lenient")
REAL = {  # experiment -> what is shown of its runs of the real model
    "basic": (*ACCURACY, "eval/pass@8", "before/pass@64", "after/pass@64", "seconds"),
    "rare": (*ACCURACY, "eval/pass@8", "tokens", "seconds"),
    "diversity": (*ACCURACY, "eval/pass@8", "entropy", "distinct", "distance"),
    "judge": (*ACCURACY, "judged", "judge/auc", "order/first", "order/consistent"),
    "verification": (*ACCURACY, "verdicts/accuracy", "verdicts/yes_rate", "gained/verification"),
    "meta": (*ACCURACY, "fell", "stopped early", "p_yes", "overrated"),
    "flow": (*ACCURACY, "eval/turns", "eval/tool_errors"),
    "label-free": (*ACCURACY, "eval/pass@8", "entropy", "eval/mean_length"),
    "engines": (*ACCURACY, "seconds"),
}


def _faults(chaos: dict) -> str:
    """What `tests/chaos.py` did to runs, how often, and in how many trials it went wrong."""
    kinds = dict.fromkeys(one["run"] for one in chaos["faults"])
    times = {(one["fault"], one["run"]): one["times"] for one in chaos["faults"]}
    rows = (
        [fault, *(times.get((fault, kind), 0) for kind in kinds)]
        for fault in dict.fromkeys(fault for fault, _ in times)
    )
    trials = sum(each["trials"] for each in chaos["trials"])
    failed = sum(len(each["failures"]) for each in chaos["trials"])
    kills = sum(n for (fault, _), n in times.items() if fault in ("SIGKILL", "SIGTERM"))
    total = f"{sum(times.values()):,} faults, {kills:,} of them by SIGKILL or SIGTERM"
    seeds = ", ".join(
        f"{each['first']} to {each['first'] + each['trials'] - 1}"
        + (f" by {' and '.join(each['only'])} alone" if each["only"] else "")
        for each in chaos["trials"]
    )
    told = f"{total}, in {trials:,} trials: {failed} failures (seeds {seeds})."
    return markdown_table(["fault", *kinds], *rows) + f"\n{told}\n"


def write_results(checkout: str | Path = CHECKOUT) -> list[Path]:
    """Renew the pages of `pages`, and the report beside the results; returns the files.

    ValueError before anything is written, if a result, a claim or a page cannot be used.
    """
    texts, results = pages(checkout), Path(checkout) / "data" / "results"
    report = write_report(results, results, page=False)
    curves = {
        label: reported(name, results=results, x="step")["curves"]["eval/pass@1"][arm]
        for label, (name, arm) in METHODS.items()
    }
    figure = arm_bands({"eval/pass@1": curves}, "steps of 64 answers")
    figure.savefig(results / "figures" / "methods.png", dpi=130)
    for page, text in texts.items():
        write_atomic(page, text)
    return [*texts, report]


def pages(checkout: str | Path = CHECKOUT) -> dict[Path, str]:
    """Page -> its text with the tables of today. Raises ValueError, as `write_results` does."""
    results, tests = Path(checkout) / "data" / "results", Path(checkout) / "tests"
    breaks = [
        (one["what"], " ".join(f"`{part}`" for part in one["killed_by"].split("::")))
        for one in json.loads((results / "mutants.json").read_bytes())
    ]
    parts = {
        Path(checkout) / "README.md": {"minutes": minutes(results), "hours": hours(results)},
        results / "README.md": measured(results),
        tests / "README.md": {
            "mutants": markdown_table(["break", "noticed by"], *breaks),
            "chaos": _faults(json.loads((results / "chaos.json").read_bytes())),
        },
    }
    return {page: with_parts(page.read_text(encoding="utf-8"), of) for page, of in parts.items()}


def measured(results: Path) -> dict[str, str]:
    """Name -> Markdown of each table of the results page."""
    judged, problems = reported_claims(results)
    if problems:
        raise ValueError(" ".join(problems))
    verdicts = [one.verdict for one in judged]
    chances = [
        (f"{sd:g}", *(f"{power(sd, n, claims=FAMILY):.0%}" for n in (5, 10, 20)))
        for sd in (0.01, 0.02, 0.03, 0.05)
    ]
    parts = {
        "verdicts": markdown_table(COUNTED, map(verdicts.count, COUNTED)),
        "power": markdown_table(["spread over seeds", "5 seeds", "10 seeds", "20 seeds"], *chances),
        "test_sets": test_sets(results / "test_sets"),
        "real": real(results),
        "accelerators": accelerators(results),
    }
    for name, report, file in (
        ("speedrun", speedrun.report, "speedrun.json"),
        ("step", bench.report, "bench/bench.json"),
    ):
        parts[name] = report(json.loads((results / file).read_bytes()))
    for name in ("basic", "engines"):
        parts[name] = summary_text(reported(name, results=results), MEASURES)
    for name in dict.fromkeys(one.claim.experiment for one in judged):
        ids = [j.claim.id for j in judged if j.claim.experiment == name and j.judgement]
        parts[name] = claims_text(judged, *ids, worlds=True) if ids else "None has been run yet.\n"
    return parts


def real(results: Path) -> str:
    """Markdown tables of the runs of `smol`, an experiment after the other."""
    ran = {record.experiment for record in load_current(results, "smol")[0]}
    tables = (
        f"#### {HEADINGS[name]}\n\n{summary_text(reported(name, 'smol', results), metrics)}"
        for name, metrics in REAL.items()
        if name in ran
    )
    return "\n".join(tables) or "None has been run yet.\n"


def accelerators(results: Path) -> str:
    """Markdown table: how long arms of `smol` took that ran on several kinds of hardware."""
    took: dict[tuple, dict[str, list[float]]] = {}
    for run in load_current(results, "smol")[0]:
        on = run.machine["accelerator"].replace("none", "CPU")
        of = took.setdefault((HEADINGS[run.experiment], run.arm), {})
        of.setdefault(on, []).append(run.seconds / 60)
    kinds = sorted({on for of in took.values() for on in of})
    rows = (
        (*arm, *(f"{median(of[on]):.1f} ({len(of[on])})" if on in of else "–" for on in kinds))
        for arm, of in took.items()
        if len(of) > 1
    )
    return markdown_table(["minutes of training (runs)", "arm", *kinds], *rows)


def minutes(results: Path) -> str:
    """Markdown table: how long each notebook took, the median of its runs on a kind of machine."""
    took: dict[tuple[str, bool], list[Record]] = {}
    for profile in ("tiny", "smol"):
        for run in load(results, profile, NOTEBOOKS)[0]:
            took.setdefault((profile, run.machine["accelerator"] != "none"), []).append(run)
    names, rows = sorted({run.arm[:2] for runs in took.values() for run in runs}), []
    for (profile, gpu), runs in took.items():
        on = {run.machine["accelerator" if gpu else "processor"] for run in runs}
        of = ([run.seconds / 60 for run in runs if run.arm[:2] == name] for name in names)
        cells = (number(round(median(minutes), 1) if minutes else None) for minutes in of)
        rows.append((f"`{profile}`", ", ".join(sorted(on)), *cells))
    return markdown_table(["minutes of notebook", "machine", *names], *rows)


def hours(results: Path) -> str:
    """A sentence: how long the steps of all stored runs took."""
    took = []
    for profile in ("tiny", "smol"):
        runs = [run for run in load(results, profile)[0] if run.experiment != NOTEBOOKS]
        time = sum(run.seconds for run in runs) / 3600
        took.append(f"{len(runs)} runs of `{profile}` took {time:.0f} hours")
    return f"The stored {' and '.join(took)} of training, without their evaluations.\n"


def test_sets(folder: Path) -> str:
    """Markdown table of the files that `grpo-kit evaluate` wrote there."""
    rows = []
    for file in sorted(folder.glob("*.json")):
        one = json.loads(file.read_bytes())
        shares = []
        for name in GRADINGS:
            share, low, high = (number(one[name + end]) for end in ("", "/low", "/high"))
            shares.append(f"{share} [{low}, {high}]")
        cut = f"{one['truncated']:.0%}"
        rows.append((one["task"], one["policy"], one["adapter"] or "none", *shares, cut, one["n"]))
    return markdown_table(["test set", "model", "warm-up", *GRADINGS, "cut off", "n"], *rows)


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks. Raises ValueError for a part without them."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"a page needs one part between {begin} and {end}; add them.")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{part}\n{end}{after}"
    return text
