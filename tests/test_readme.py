"""What documents say exists and is so: tables, links, commands, and what notebooks say of runs."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from test_packaging import make_environment
from trl import GRPOConfig
from typer.main import get_command

from grpo_kit.cli import app
from grpo_kit.lab.claims import reported_claims
from grpo_kit.lab.report import write_results
from grpo_kit.lab.summary import reported

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


def test_numbers_in_the_pages_own_words_are_those_of_today():
    mean = {one.claim.id: one.judgement.mean for one in reported_claims()[0] if one.judgement}
    free = [mean[f"{name}-learns"] for name in ("p-yes", "p-yes-format", "majority", "certainty",
                                                "likelihood")]  # fmt: skip
    judge, ends = reported("judge")["final"], reported("dial-shortcut")["final"]
    updates = reported("dial-updates")["final"]
    none, clip, lower, upper = (f"{updates[f'{arm}, 8']['eval/pass@1']['mean']:.2f}" for arm in (
        "no clip", "clip", "clip below 0.8", "clip above 1.2"))  # fmt: skip
    often = {arm: ends[f"{arm}, 0.7"]["eval/pass@1"]["mean"] for arm in ("diversity", "plain")}
    lost = reported("diversity")["difference"]["normalised first"]["eval/pass@1"]["mean"]
    real = reported("real", "smol")["difference"]["P(Yes) alone"]["eval/lenient/pass@1"]["mean"]
    gain, alone = f"{min(free):.2f} to {max(free):.2f} more", judge["judge only"]["eval/pass@1"]
    longer, ends = "more warm-up, as long", reported("real-svamp", "smol")["final"]

    def svamp(arm, tries):
        return ends[arm][f"after/{tries}"]["mean"] - ends[arm][f"before/{tries}"]["mean"]

    said = {
        "data/results/README.md": [
            f"rises by {mean['grpo-learns']:.2f}.", f"gain {gain}",
            f"loses {-mean['coin-falls']:.2f}.", f"often (+{mean['verify-learnt']:.2f})",
            f"a little (+{mean['verify-helps-answers']:.2f})",
            f"ends at {alone['mean']:.2f} (mean of five seeds, "
            f"{max(alone['values']):.2f} at most)",
            f"no clip falls to {none}, the clip keeps {clip}, its lower half alone {lower}, its "
            f"upper half {upper}.",
            f"one reward an episode** (+{mean['flow-success']:.2f})",
            f"ends {mean['real-p-yes']:.2f} above a coin, and a vote "
            f"{-mean['real-majority']:.2f} below labels", f"cost {-lost:.2f} of accuracy",
            f"ends {-real:.2f} below labels, under",
            f"right {100 * judge['KL']['eval/greedy']['mean']:.1f} % of",
            f"sampled ones {100 * judge['KL']['eval/pass@1']['mean']:.0f} %",
            f"try {often['diversity']:.2f} where the shortcut is most frequent, plain GRPO "
            f"{often['plain']:.2f}", f"lost {-mean['flow-judged']:.2f}.",
            f"GRPO gains {svamp('plain', 'pass@1'):.3f} [", "more warm-up loses "
            f"{-svamp(longer, 'pass@1'):.3f}.", f"solve less, by {-svamp('plain', 'pass@64'):.3f} "
            f"and {-svamp(longer, 'pass@64'):.3f}:",
        ],
        "README.md": [
            f"by {mean['grpo-learns']:.2f} (one", f"gain {gain}", f"ends at {alone['mean']:.2f}.",
            f"falls by {-mean['coin-falls']:.2f}.",
            f"ends {mean['real-p-yes']:.2f} above a coin if paid by P(\"Yes\"), "
            f"{-mean['real-majority']:.2f} below labels if",
            f"GRPO gains {svamp('plain', 'pass@1'):.2f}, more warm-up loses "
            f"{-svamp(longer, 'pass@1'):.2f};",
        ],
    }  # fmt: skip
    for page, phrases in said.items():
        text = " ".join((CHECKOUT / page).read_text().split())
        assert [phrase for phrase in phrases if phrase not in text] == []


def test_the_readmes_table_is_the_stored_comparisons():
    readme = (CHECKOUT / "README.md").read_text()
    for line in (RESULTS / "idea" / "comparison.md").read_text().splitlines()[2:5]:
        arm, accuracy, _, minus, verdict, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        (shown,) = re.findall(rf"(?m)^\| {re.escape(arm)} \| (.*?) \| (.*?) \| (.*?) \|$", readme)
        numbers = [[*map(float, re.findall(r"[-+]?[\d.]+", text))] for text in (accuracy, minus)]
        rounded = [[*map(float, re.findall(r"[-+]?[\d.]+", text))] for text in shown[:2]]
        assert rounded == [[round(number, 3) for number in of] for of in numbers]
        assert shown[2] == verdict


@pytest.mark.slow
def test_the_report_beside_the_results_is_what_the_stored_runs_give(tmp_path):
    """Figures by the numbers that they show, since fonts differ from machine to machine."""
    renewed = tmp_path / "data" / "results"
    shutil.copytree(RESULTS, renewed)
    assert write_results(tmp_path) == renewed / "report.md"
    assert (renewed / "report.md").read_text() == (RESULTS / "report.md").read_text()
    for path in RESULTS.glob("figures/*.png"):
        pictures = ((folder / "figures" / path.name).read_bytes() for folder in (renewed, RESULTS))
        # each carries the hash of its numbers as its description
        here, there = (re.search(rb"tEXtDescription\x00[0-9a-f]{16}", one)[0] for one in pictures)
        assert here == there, f"`make results` draws {path.name} anew"


# --- links and commands ---------------------------------------------------------------------------


def test_the_readme_is_two_screens():
    """The rest has pages of its own: data/results, grpo_kit and tests."""
    assert len((CHECKOUT / "README.md").read_bytes()) <= 8_000


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


# --- what a reader types --------------------------------------------------------------------------

SHORTER = {
    "--set max_steps=50": "--set max_steps=1 --set eval_prompts=8",
    "max_steps=50": "max_steps=1, eval_prompts=8",
    "range(5)": "range(1)",
    "--seeds 0-4": "--seeds 0",
}
ELSEWHERE = ("vllm", "torchrun", "--profile")  # a recipe for another machine


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, body) of each fenced block, with the numbers of a run that ends at once."""
    text = (CHECKOUT / page).read_text()
    for usual, shorter in SHORTER.items():
        text = text.replace(usual, shorter)
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def typed(script: str, folder: Path, **environment: str) -> str:
    """What a shell prints, in which all of it succeeds."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ, **environment}
    options = {"capture_output": True, "text": True, "timeout": 900, "env": environment}
    done = subprocess.run(["bash", "-euc", script], cwd=folder, **options)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_readme_can_be_typed_as_it_stands_into_a_fresh_clone(tmp_path):
    """The environment borrows the packages of the running one; hours of work are planned only."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("needs the repository")
    scripts, site = make_environment(tmp_path / "environment")
    borrowed = tmp_path / "grpo-kit", sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text("\n".join(map(str, borrowed)))
    (scripts / "grpo-kit").write_text(f"#!{scripts}/python\nfrom grpo_kit.cli import app\napp()\n")
    (scripts / "grpo-kit").chmod(0o755)
    script = "unset PYTHONPATH\n"
    for language, body in blocks("README.md"):
        if language == "bash":
            script += re.sub("(?m)^make (?!venv)", "make -n ", body)
        elif language == "python":
            assert len([line for line in body.splitlines() if line]) <= 15
            script += f"cat > idea.py <<'END'\n{body}END\npython idea.py\n"
    made = f"cd grpo-kit && ln -s {tmp_path}/environment .venv && touch .venv/.installed"
    script = script.replace("ADDRESS", str(CHECKOUT)).replace("cd grpo-kit", made)
    printed = typed(script, tmp_path)
    assert "grpo-kit reproduce" in printed and "-m pytest" in printed, "make -n says what it does"
    assert printed.count("**inconclusive**") == 2, "by one seed, from Python and from the shell"


@pytest.mark.slow
def test_every_recipe_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "none")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    (tmp_path / "my-model").symlink_to(CHECKOUT / "data" / "tiny-base")
    problems = pd.read_json(CHECKOUT / "data" / "word_problems" / "train.jsonl", lines=True)
    problems.head(200).to_csv("mine.csv")
    names, vllm = {"__name__": "recipes"}, set()
    for language, body in blocks("grpo_kit/README.md"):
        assert len([line for line in body.splitlines() if line]) <= 10, body
        here = not any(word in body for word in ELSEWHERE)
        if language == "bash" and here:
            command = body.replace("grpo-kit ", f"{sys.executable} -m grpo_kit ")
            typed(command, tmp_path, PYTHONPATH=str(CHECKOUT))
        elif language == "python" and (find_spec("trackio") or "trackio" not in body):
            code = compile(body, body, "exec")
            vllm |= set(re.findall(r"\w*vllm_\w*", body))
            if here:
                exec(code, names)
    printed = capsys.readouterr().out
    assert "1. lookup" in printed and "<answer>" in printed and "aten::addmm" in printed
    assert vllm and vllm <= {field.name for field in fields(GRPOConfig)}


# --- what notebooks and the results page say of the stored runs ---------------------------------

summary_of = functools.cache(reported)
SAID = [  # experiment, arm, metric, direction of the difference from the first arm
    ("diversity", "diversity", "distance", 1), ("diversity", "diversity", "entropy", 0),
    ("diversity", "diversity", "eval/mean_length", 1),
    ("diversity", "diversity", "eval/pass@1", -1),
    ("diversity", "normalised first", "eval/pass@1", -1),
    ("judge", "judge added", "judged", 1), ("judge", "judge added", "eval/pass@1", 0),
    ("judge", "judge added", "eval/mean_length", -1), ("judge", "judge only", "eval/pass@1", -1),
    ("judge", "KL", "eval/pass@1", -1), ("judge", "two judges", "eval/pass@1", -1),
    ("meta", "P(Yes) alone", "eval/pass@1", -1), ("meta", "random", "eval/lenient/pass@1", -1),
    ("meta", "random and format", "eval/lenient/pass@1", -1),
    ("meta", "our defaults", "eval/lenient/pass@1", -1),
    ("corrections", "two updates", "eval/pass@1", 1), ("engines", "TRL", "eval/pass@1", 0),
    ("flow", "per turn", "eval/pass@1", 0), ("flow", "final turn only", "eval/pass@1", 0),
]  # fmt: skip


@pytest.mark.parametrize(("experiment", "arm", "metric", "sign"), SAID)
def test_what_is_said_of_an_arm_is_so(experiment, arm, metric, sign):
    """Above or below the first arm with the whole interval, or neither."""
    found = summary_of(experiment)["difference"][arm][metric]
    assert int(found["low"] > 0) - int(found["high"] < 0) == sign


def test_what_is_said_of_the_curves_is_so():
    """Some rewards raise accuracy and then ruin it in every seed."""
    for experiment, arm in (("judge", "judge only"), ("label-free", "likelihood")):
        for values in summary_of(experiment)["curves"]["eval/pass@1"][arm]["values"]:
            assert max(values) > values[0] and values[-1] < 0.3, (experiment, arm)
    for values in summary_of("meta")["curves"]["meta/p_yes"]["P(Yes) alone"]["values"]:
        assert values[-1] > 1.4 * values[0], "the README's picture"
    flow = summary_of("flow")
    starts = [values[0] for values in flow["curves"]["eval/pass@1"]["trajectory"]["values"]]
    ends = flow["final"]["trajectory"]["eval/pass@1"]["values"]
    assert all(end > 2 * start for start, end in zip(starts, ends, strict=True))
    for arm in ("mixed", "verify-init", "verify-alter"):
        final = summary_of("verification")["final"][arm]
        assert final["eval/pass@1"]["median"] > 0.88 < final["verdicts/accuracy"]["mean"], arm


def test_what_is_said_of_speed_is_so():
    bench = json.loads((RESULTS / "bench/bench.json").read_text())
    assert all(shape["trl_over_kit"]["step"] > 1 for shape in bench["shapes"])
    assert bench["step"]["trl_over_kit"]["step"] >= 2.5
    assert all(shape["peak_mib"]["trl"] > shape["peak_mib"]["kit"] for shape in bench["shapes"])
