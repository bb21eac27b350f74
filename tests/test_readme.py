"""What documents say exists and is so: tables, links, commands, and what notebooks say of runs."""

import ast
import functools
import json
import re
import shutil
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from typer.main import get_command

from grpo_kit.cli import app
from grpo_kit.lab import readme
from grpo_kit.lab.readme import pages, with_parts, write_results
from grpo_kit.lab.summary import reported as summary_of

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "data" / "results"
NOTEBOOKS = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))
PAGES = ("*.md", "grpo_kit/**/*.md", "tests/**/*.md", "data/**/*.md")
MARKDOWN = sorted(path for pattern in PAGES for path in CHECKOUT.glob(pattern))
SOURCES = sorted((CHECKOUT / "grpo_kit").rglob("*.py"))
COMMANDS = get_command(app).commands
TARGETS = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))


def named(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


# --- tables ---------------------------------------------------------------------------------------


def test_computed_tables_are_what_the_stored_results_give():
    renewed = pages(CHECKOUT)
    computed = {"README.md", "data/results/README.md", "tests/README.md"}
    assert {named(page) for page in renewed} == computed
    for page, text in renewed.items():
        assert page.read_text() == text, f"`make results` renews {named(page)}"


def test_parts_are_put_between_their_marks_and_a_page_without_them_is_refused():
    text = with_parts("kept <!-- a --> old <!-- /a --> kept", {"a": "new\n"})
    assert text == "kept <!-- a -->\n\nnew\n\n<!-- /a --> kept"
    assert with_parts(text, {"a": "new\n"}) == text
    with pytest.raises(ValueError, match="between <!-- b --> and <!-- /b -->; add"):
        with_parts(text, {"b": "new"})


def test_hardware_is_compared_where_an_arm_ran_on_several_kinds(monkeypatch):
    ran = [("plain", "none", 60), ("plain", "none", 180), ("plain", "A GPU", 30), ("KL", "none", 9)]
    runs = [
        SimpleNamespace(experiment="basic", arm=arm, machine={"accelerator": on}, seconds=seconds)
        for arm, on, seconds in ran
    ]
    monkeypatch.setattr(readme, "load_current", lambda *_: (runs, []))
    head, _, row = readme.accelerators(RESULTS).splitlines()
    assert head.endswith("| arm | A GPU | CPU |") and row.endswith("| plain | 0.5 (1) | 2.0 (2) |")


def test_a_notebooks_minutes_on_a_gpu_stand_on_a_line_of_their_own(monkeypatch):
    runs = [
        SimpleNamespace(arm=arm, machine={"processor": "A CPU", "accelerator": on}, seconds=seconds)
        for arm, on, seconds in [("01_a", "none", 600), ("01_a", "A GPU", 90), ("02_b", "none", 60)]
    ]
    stored = {"smol": (runs, []), "tiny": ([], [])}
    monkeypatch.setattr(readme, "load", lambda _, profile, __: stored[profile])
    head, _, *rows = readme.minutes(RESULTS).splitlines()
    assert head == "| minutes of notebook | machine | 01 | 02 |"
    assert rows == ["| `smol` | A CPU | 10 | 1 |", "| `smol` | A GPU | 1.5 | – |"]


@pytest.mark.slow
def test_the_report_beside_the_results_is_what_the_stored_runs_give(tmp_path):
    """Figures by the numbers that they show, since fonts differ from machine to machine."""
    shutil.copytree(RESULTS, tmp_path / "data" / "results")
    (tmp_path / "tests").mkdir()
    for page in ("README.md", "tests/README.md"):
        shutil.copy(CHECKOUT / page, tmp_path / page)
    files = write_results(tmp_path)
    assert [path.name for path in files] == [*["README.md"] * 3, "report.md"]
    renewed = tmp_path / "data" / "results"
    assert (renewed / "report.md").read_text() == (RESULTS / "report.md").read_text()
    assert not (renewed / "report.html").exists()
    for path in RESULTS.glob("figures/tiny-*.png"):
        pictures = ((folder / "figures" / path.name).read_bytes() for folder in (renewed, RESULTS))
        # each carries the hash of its numbers as its description
        here, there = (re.search(rb"tEXtDescription\x00[0-9a-f]{16}", one)[0] for one in pictures)
        assert here == there, f"`make results` draws {path.name} anew"


# --- links and commands ---------------------------------------------------------------------------


def test_the_readme_is_two_screens():
    """The rest has pages of its own: data/results, grpo_kit and tests."""
    assert len((CHECKOUT / "README.md").read_bytes()) <= 9_000


@pytest.mark.parametrize("path", [*MARKDOWN, *NOTEBOOKS], ids=named)
def test_local_links_lead_to_files(path):
    text = "\n".join(prose_and_shell(path))
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", text):
        address = "".join(target)
        if "://" not in address and not address.startswith(("mailto:", "data:", "attachment:")):
            assert (path.parent / address).exists(), f"{named(path)} leads to {address}"


SHELLS = ("", "bash", "sh", "shell", "console")
CALL = re.compile(r"(?:^|\s)(grpo-kit|grpo_kit\.cli|make)\s+([a-z][a-z-]*)\b(.*)", re.DOTALL)


def prose_and_shell(path: Path) -> list[str]:
    """Markdown of a page or notebook, docstrings and messages of a module; shell lines fenced."""
    if path.suffix == ".md":
        return [path.read_text()]
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(path.read_text()))
        return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    cells = json.loads(path.read_text())["cells"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    code = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    shell = re.findall(r"^\s*[!%](.*)", code, re.MULTILINE)
    return [*prose, *re.findall("`[^`\n]+`", code), "```sh\n" + "\n".join(shell) + "\n```\n"]


def commands_in(text: str) -> list[tuple[str, str, list[str]]]:
    """(program, what is called, its --options) in shell blocks, indented lines and inline code."""
    text = text.replace("\\\n", " ")
    blocks = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    shell = [body for language, body in blocks.findall(text) if language in SHELLS]
    shell = [re.sub(r"\s#.*", "", body) for body in shell]
    lines = [line for body in shell for line in re.split(r"\n|;|&&|\|", body)]
    text = blocks.sub("", text)
    lines += re.findall(r"`((?:grpo-kit|make) [^`]+)`", text)
    lines += re.findall(r"^ {4,}((?:grpo-kit|make) .*)", text, re.MULTILINE)
    calls = [match for line in lines if (match := CALL.search(line))]
    return [(m[1], m[2], re.findall(r"(?<!\S)--[a-z][a-z-]*", m[3])) for m in calls]


def test_commands_are_found_wherever_they_are_named():
    shell = "```sh\nA=1 grpo-kit a \\\n --b  # make x\ntorchrun -m grpo_kit.cli c\n```\n"
    text = "`make d` and `grpo-kit e\n --f-g 1` `make`\n\n    make h\n```python\nmake i\n```\n"
    assert commands_in(shell + text) == [
        ("grpo-kit", "a", ["--b"]), ("grpo_kit.cli", "c", []), ("make", "d", []),
        ("grpo-kit", "e", ["--f-g"]), ("make", "h", []),
    ]  # fmt: skip


@pytest.mark.parametrize("path", [*MARKDOWN, *NOTEBOOKS, *SOURCES], ids=named)
def test_every_command_that_is_named_exists_with_its_options(path):
    for text in prose_and_shell(path):
        for tool, name, options in commands_in(text):
            if tool == "make":
                assert name in TARGETS, f"{named(path)} names `make {name}`"
                continue
            assert name in COMMANDS, f"{named(path)} names `grpo-kit {name}`"
            known = {opt for p in COMMANDS[name].params for opt in (*p.opts, *p.secondary_opts)}
            unknown = set(options) - known - {"--help"}
            assert not unknown, f"{named(path)} names `grpo-kit {name}` with {unknown}"


def test_the_example_of_an_agent_runs(capsys):
    page = (CHECKOUT / "grpo_kit" / "README.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.S) if "agent_system" in c]
    exec(code, {})
    printed = capsys.readouterr().out
    assert "step 1" in printed and "<answer>" in printed


# --- what notebooks and the results page say of the stored runs ---------------------------------


reported = functools.cache(summary_of)


def of(name: str, arm: str, metric: str = "eval/pass@1", kind: str = "final") -> dict:
    return reported(name)[kind][arm][metric]


def direction(name: str, arm: str, metric: str = "eval/pass@1") -> int:
    """Whether the whole interval of a difference from the first arm is above 0, or below."""
    values = of(name, arm, metric, "difference")
    return int(values["low"] > 0) - int(values["high"] < 0)


def curves_of(name: str, arm: str, metric: str = "eval/pass@1") -> list[list[float]]:
    return of(name, metric, arm, "curves")["values"]


def test_what_is_said_of_diversity_and_judge_is_so():
    for arm in ("diversity", "only correct"):
        known = [direction("diversity", arm, m) for m in ("distance", "entropy")]
        assert known == [1, 0]
        assert direction("diversity", arm, "eval/mean_length") == 1 > direction("diversity", arm)
        assert abs(of("diversity", arm, kind="difference")["median"]) < 0.03
    assert of("diversity", "normalised first", kind="difference")["median"] < -0.1
    assert median(v[0] for v in curves_of("variants", "plain", "eval/pass@8")) > 0.95

    metrics = ("judged", "eval/pass@1", "eval/mean_length")
    assert [direction("judge", "judge added", m) for m in metrics] == [1, 0, -1]
    for values in curves_of("judge", "judge only"):
        assert max(values) > values[0] + 0.05 and values[-1] < 0.15, "rises, then falls"
    plain = of("judge", "plain")["median"]
    assert of("judge", "judge x 8")["median"] < plain - 0.3
    assert abs(of("judge", "only correct")["median"] - plain) < 0.03
    assert 0.5 < of("judge", "KL")["median"] < plain - 0.2
    assert of("judge", "two judges", "assured")["median"] < 0.05
    assert of("judge", "two judges")["median"] < plain - 0.2


def test_what_is_said_of_self_verification_is_so():
    gained = [of("verification", arm, "gained/generation") for arm in ("self-verify", "generate")]
    assert 0 < 5 * gained[0]["median"] < gained[1]["median"]
    for arm in ("mixed", "verify-init", "verify-alter"):
        assert of("verification", arm, "verdicts/accuracy")["mean"] > 0.88
        assert of("verification", arm)["median"] > 0.88
    for metric in ("eval/pass@1", "verdicts/accuracy"):
        whole = of("verification", "mixed", metric)
        for stage in ("unfiltered", "undiversified", "unbalanced"):
            without = of("verification", f"mixed, {stage}", metric)
            assert without["low"] <= whole["high"] and without["high"] >= whole["low"], stage


def test_what_is_said_of_p_yes_is_so():
    fell, gained = (
        {arm: values[name] for arm, values in reported("meta")["final"].items()}
        for name in ("fell", "gained/stopped early")
    )
    assert fell["our defaults"]["low"] > 0 and fell["P(Yes) alone"]["low"] > 0
    assert 0.03 < fell["truth 10 %"]["median"] < fell["truth 1 %"]["median"]
    assert fell["truth 1 %"]["median"] < fell["our defaults"]["median"]
    steps = ("P(Yes) alone", "P(Yes) and format", "our defaults")
    assert sorted(steps, key=lambda arm: gained[arm]["mean"]) == [*steps]
    ends = of("meta", "P(Yes) and format")["values"]
    assert sum(end < 0.5 for end in ends) == 1 and fell["P(Yes) and format"]["median"] < 0.05
    for arm in ("ensemble", "live evaluator", "warmer evaluator", "other question"):
        assert of("meta", arm, "fell", "difference")["low"] > 0, arm
    for arm in reported("meta")["difference"]:
        assert of("meta", arm, "stopped early")["median"] > of("meta", arm)["median"] - 0.03, arm
        assert direction("meta", arm) == -1, arm


def test_what_is_said_of_rewards_without_labels_is_so():
    votes, labels = (of("label-free", arm)["median"] for arm in ("majority", "labels"))
    assert abs(votes - labels) < 0.03
    for arm in ("self-certainty", "likelihood"):
        for values in curves_of("label-free", arm):
            assert max(values) > values[0] and values[-1] < 0.3, "rises, then falls"


def test_what_is_said_of_the_corrections_is_so():
    ends = reported("corrections")["final"]
    final = {arm: values["eval/pass@1"]["mean"] for arm, values in ends.items()}
    assert direction("corrections", "two updates") == 1
    twice = {"two updates", "clip-higher", "dual clip", "GSPO", "CISPO"}
    for arm in final.keys() - {"plain", "two updates", "KL, long", "KL, uncorrected, long"}:
        baseline = "two updates" if arm in twice else "plain"
        gap = abs(final[arm] - final[baseline])
        assert gap < final["two updates"] - final["plain"], arm


def test_what_is_said_of_flow_grpo_is_so():
    starts, ends = curves_of("flow", "trajectory"), of("flow", "trajectory")["values"]
    assert all(end > 2 * values[0] for values, end in zip(starts, ends, strict=True))
    for arm in ("per turn", "final turn only"):
        difference = of("flow", arm, kind="difference")
        assert difference["low"] < -0.03 and 0.03 < difference["high"]
    assert of("flow", "offline traces", "gained/success")["low"] > 0
    assert of("flow", "offline traces", "eval/greedy")["median"] > 0.9


def test_what_is_said_of_speed_is_so():
    bench = json.loads((RESULTS / "bench/bench.json").read_text())
    assert all(shape["trl_over_kit"]["step"] > 1 for shape in bench["shapes"])
    assert bench["step"]["trl_over_kit"]["step"] >= 2.5
    assert direction("engines", "TRL") == 0
