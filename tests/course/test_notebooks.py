"""The notebooks as shipped: their form, their definitions, their exercises, and a smoke run."""

import ast
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import nbformat
import numpy as np
import pydantic
import pytest
import torch
from bs4 import BeautifulSoup
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student_t

from grpo_kit import objective
from grpo_kit import self_verification as sv
from grpo_kit.course import check
from grpo_kit.course.runner import execute
from grpo_kit.flow import Episode, Turn, episode_advantages
from grpo_kit.lab import statistics
from grpo_kit.lab.claims import claims_text, load_claims, reported_claims
from grpo_kit.lab.experiments import load_current
from grpo_kit.lab.planner import REACHED, plan
from grpo_kit.lab.summary import reported
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import (
    extract_answer,
    group_similarities,
    linear_weight,
    parse_verdict,
    read_yes,
    yes_no_tokens,
)
from grpo_kit.rewards.judge import parse_judgement, tiny_prompt
from grpo_kit.rewards.judge.texts import CRITERIA

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ids = [path.stem for path in NOTEBOOKS]
SOLUTION = re.compile(r"<details><summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(outputs) -> str:
    return json.dumps([{k: v for k, v in output.items() if k != "metadata"} for output in outputs])


def figures_not_shown(notebook) -> list[str]:
    """Cells that name a figure (`<Figure size ...>`) where they should show it."""
    return [
        cell.id
        for cell in code_cells(notebook)
        for data in (output.get("data", {}) for output in cell.outputs)
        if data.get("text/plain", "").startswith("<Figure") and "image/png" not in data
    ]


def test_there_are_notebooks():
    assert ids == [
        "00_start_here",
        "01_basic_grpo",
        "02_diversity_reward",
        "03_llm_judge_reward",
        "04_self_verification",
        "05_meta_evaluation",
        "06_flow_grpo",
        "07_results",
        "08_scale_out",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_one_parameters_cell_of_literals(path):
    (cell,) = (c for c in code_cells(read(path)) if "parameters" in c.metadata.get("tags", []))
    values = {}
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.Assign), "only assignments"
        values[statement.targets[0].id] = ast.literal_eval(statement.value)
    assert values["PROFILE"] == "tiny" and isinstance(values["SEED"], int)
    assert values["OUTPUT_DIR"] == f"../runs/{path.stem}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_executed_without_an_error_and_without_a_trace_of_the_machine(path):
    notebook = read(path)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run from a clean kernel, top to bottom"
    for cell in code_cells(notebook):
        assert all(output.output_type != "error" for output in cell.outputs)
        shown = text_of(cell.outputs)
        assert not re.search(r"(?<![\w.<])/(?:home|root|tmp|work|usr|Users)/", shown), cell.id
        assert "widget-view" not in shown and not re.search(r"\d+(\.\d+)?(it/s|s/it)", shown)
    assert any("image/png" in text_of(cell.outputs) for cell in code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_figures_are_shown(path):
    assert not figures_not_shown(read(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_no_cell_is_longer_than_a_screen_or_wider_than_the_page(path):
    for cell in code_cells(read(path)):
        lines = cell.source.splitlines()
        assert len(lines) <= 45 and max(map(len, lines)) <= 105, cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_packages_are_only_installed_in_colab(path):
    installing = [c.source for c in code_cells(read(path)) if "pip install" in c.source]
    assert len(installing) == 1 and 'if "google.colab" in sys.modules' in installing[0]
    assert not re.search(r"torch|numpy", installing[0].split("%pip")[1])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_solutions_pass_their_checks_and_stubs_are_not_done(path):
    notebook = read(path)
    checks = re.findall(r"check\.(\w+)\(\1\)", "\n".join(c.source for c in code_cells(notebook)))
    solutions = SOLUTION.findall("\n".join(c.source for c in notebook.cells))
    assert 2 <= len(checks) == len(solutions) <= 4
    for name, solution in zip(checks, solutions, strict=True):
        namespace = {}
        exec(solution, namespace)
        verdict = getattr(check, name)(namespace[name])
        assert verdict, (name, verdict)
        stub = next(c.source for c in code_cells(notebook) if f"def {name}(" in c.source)
        exec(stub, {**namespace, "check": check})  # shows its line, never raises
        exec(stub.replace(f"check.{name}({name})", ""), namespace)
        assert getattr(check, name)(namespace[name]).state == "not done"


# --- what the notebooks define is what the package does -------------------------------------------


def defined_in(name: str, wanted: str, **namespace) -> dict:
    """The wanted functions and classes of a notebook, by name, without running the notebook."""
    for cell in code_cells(read(FOLDER / f"{name}.ipynb")):
        if cell.id == "pip":
            continue
        for statement in ast.parse(re.sub(r"(?m)^%.*", "", cell.source)).body:
            if getattr(statement, "name", None) in wanted.split():
                exec(compile(ast.Module([statement], []), cell.id, "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def basics() -> dict:
    return defined_in("01_basic_grpo", "advantages kl clipped_objective grpo_loss", torch=torch)


@pytest.fixture(scope="module")
def diverse() -> dict:
    return defined_in("02_diversity_reward", "similarities weight", torch=torch)


@pytest.fixture(scope="module")
def judging() -> dict:
    names = "ask Scores quality"
    return defined_in("03_llm_judge_reward", names, pydantic=pydantic, CRITERIA=CRITERIA)


@pytest.fixture(scope="module")
def verifying() -> dict:
    names = "verdict by_query filtered diverse balanced_items labels skewed"
    given = {"re": re, "random": random, "defaultdict": defaultdict, "self_verification": sv}
    return defined_in("04_self_verification", names, **given)


@pytest.fixture(scope="module")
def asking() -> dict:
    names = "probability meta_reward centred cispo kind"
    given = {"torch": torch, "yes_no_tokens": yes_no_tokens, "extract_answer": extract_answer}
    return defined_in("05_meta_evaluation", names, re=re, **given)


@pytest.fixture(scope="module")
def flowing() -> dict:
    given = {"torch": torch, "Episode": Episode, "Turn": Turn}
    return defined_in("06_flow_grpo", "advantages toy_episode eq_10", **given)


@pytest.fixture(scope="module")
def testing() -> dict:
    return defined_in("07_results", "p_rises adjusted", np=np, math=math, student=student_t)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.booleans())
def test_advantages_of_the_notebook_equal_the_package(basics, seed, size, binary):
    rewards = torch.rand(4 * size, generator=torch.Generator().manual_seed(seed))
    rewards = rewards.round() if binary else rewards
    torch.testing.assert_close(
        basics["advantages"](rewards, size), objective.group_advantages(rewards, size)
    )


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.04, 1.0]), st.sampled_from([0.1, 0.2]))
def test_loss_and_kl_of_the_notebook_equal_the_package(basics, seed, beta, epsilon):
    generator = torch.Generator().manual_seed(seed)
    logps, old, ref = -torch.rand((3, 4, 6), generator=generator) * 3
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    advantages = torch.randn(4, generator=generator)
    torch.testing.assert_close(basics["kl"](logps, ref), objective.kl_estimate(logps, ref, "k3"))
    gradients = []
    for function, options in (
        (basics["grpo_loss"], {}),
        (objective.policy_loss, {"loss_type": "grpo", "use_bias_correction_kl": False}),
    ):
        variable = logps.clone().requires_grad_()
        loss = function(
            variable, old, advantages, mask, epsilon=epsilon, beta=beta, ref_logps=ref, **options
        )
        loss.backward()
        gradients.append((loss.detach(), variable.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.floats(0, 1))
def test_similarities_and_weight_of_the_notebook_equal_the_package(diverse, seed, size, progress):
    embeddings = torch.randn(4 * size, 5, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        diverse["similarities"](embeddings, size), group_similarities(embeddings, size)
    )
    assert diverse["weight"](progress) == pytest.approx(linear_weight(progress))


values = st.one_of(st.integers(-1, 7), st.just(4.5), st.just(5.0), st.just("5"), st.booleans())


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.fixed_dictionaries({name: st.integers(1, 5) for name in CRITERIA}),
        st.fixed_dictionaries({}, optional={name: values for name in CRITERIA}),
    ),
    st.integers(0, 3),
)
def test_the_quality_of_the_notebook_equals_the_package(judging, scores, cut):
    reply = json.dumps(scores)
    reply = reply[: len(reply) - cut]
    try:
        packaged = parse_judgement(reply).reward
    except ValueError:
        packaged = None
    assert judging["quality"](reply) == packaged


@given(st.text(alphabet="Mia 12+7=19.think>\n"), st.text(alphabet="Surely 15./answer>\n"))
def test_the_judge_is_asked_as_in_the_package(judging, question, response):
    """But for tags: the package fences them, as an exercise of the notebook does."""
    assert judging["ask"](question, response) == tiny_prompt(question, response)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from(["yes", "No", "YES.", "<think>", "</think>", "\\boxed{no}", "know", "so"]),
        max_size=7,
    )
)
def test_the_verdict_of_the_notebook_equals_the_package(verifying, words):
    text = " ".join(words)
    assert verifying["verdict"](text) is parse_verdict(text)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8), st.integers(0, 9))
def test_the_stages_of_the_notebook_count_as_the_package_does(verifying, sizes, n):
    items = [
        sv.VerificationItem(query, "q", f"{query}-{i}", i < right)
        for query, (right, wrong) in enumerate(sizes)
        for i in range(right + wrong)
    ]
    count = verifying["labels"]
    kept, packaged = verifying["filtered"](items), sv.filter_queries(items)
    assert count(kept) == count(packaged)
    parts, theirs = verifying["diverse"](kept), sv.diversify(packaged)
    assert [count(part) for part in parts] == [count(part) for part in theirs]
    assert count(verifying["balanced_items"](*parts, n)) == count(sv.balance(*theirs, n))
    drawn = verifying["skewed"](items, 0, 16)
    assert not drawn or count(drawn) == {True: 2, False: 14}


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([2, 4]))
def test_reward_advantage_and_loss_of_05_equal_the_package(asking, seed, size):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((8, 2), generator=generator).round(decimals=1)
    rewards = asking["meta_reward"](p, [0.5, 2.0])
    by_hand = [sum(w * math.log(max(x, 1e-4)) for w, x in zip((0.5, 2.0), row, strict=True))
               for row in p.tolist()]  # fmt: skip
    assert rewards.tolist() == pytest.approx(by_hand, rel=1e-4)
    advantages = asking["centred"](rewards, size)
    expected = objective.group_advantages(rewards, size, scale_rewards="none")
    torch.testing.assert_close(advantages, expected)
    logps, old = -torch.rand((2, 8, 6), generator=generator) * 4
    mask = torch.arange(6)[None] < torch.randint(1, 7, (8, 1), generator=generator)
    gradients = []
    for function, options in (
        (asking["cispo"], {}),
        (objective.policy_loss, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ):
        variable = logps.clone().requires_grad_()
        function(variable, old, advantages, mask, **options).backward()
        gradients.append(variable.grad)
    torch.testing.assert_close(*gradients)


def test_the_probability_of_05_is_the_one_that_the_package_reads(asking, policy):
    conversation = [{"role": "user", "content": "Is 12 + 7 = 19 correct?"}]
    ((reading,),) = read_yes(policy, [[conversation]])
    assert asking["probability"](policy, conversation) == pytest.approx(tuple(reading), rel=1e-4)


def test_answers_are_told_apart_by_rule(asking):
    kind = asking["kind"]
    assert kind("<think>first 2 + 3 = 5.</think><answer>5</answer>", "5") == "right"
    assert kind("<think>first 2 + 3 = 6.</think><answer>6</answer>", "5") == "a sum is wrong"
    assert kind("<think>first 2 + 4 = 6.</think><answer>6</answer>", "5").startswith("true sums")
    assert kind("<think>Maybe 6.</think><answer>6</answer>", "5") == "no equations"
    assert kind("first 2 + 3 = 5. The answer is 5.", "5") == "not marked"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=2, max_size=8))
def test_the_advantages_of_06_equal_the_package(flowing, outcomes):
    episodes = [flowing["toy_episode"](float(right), turns) for right, turns in outcomes]
    torch.testing.assert_close(flowing["advantages"](episodes), episode_advantages(episodes))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 10_000),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_loss_of_06_equals_the_package(flowing, seed, lengths):
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
    torch.testing.assert_close(-flowing["eq_10"](*nested, advantages), packaged)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=10).filter(lambda v: len(set(v)) > 1))
def test_the_p_value_of_07_is_the_one_that_the_package_computes(testing, values):
    inside, _ = statistics.p_values(values, "rises")
    assert testing["p_rises"](values) == pytest.approx(inside)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), max_size=12))
def test_the_correction_of_07_equals_the_package(testing, p_values):
    assert testing["adjusted"](p_values) == pytest.approx(statistics.holm(p_values))


VERDICT = re.compile(r"\*\*`([a-z0-9-]+)`\*\*, \*([a-z ]+)\*")


def test_the_essays_of_07_are_on_every_claim_that_was_judged_with_the_verdict_of_today():
    essays = [c.source for c in read(FOLDER / "07_results.ipynb").cells if c.id.startswith("essay")]
    said = [pair for text in essays for pair in VERDICT.findall(text)]
    judged, _ = reported_claims()
    assert sorted(said) == sorted((one.claim.id, one.verdict) for one in judged if one.judgement)


def test_what_the_essays_of_07_say_of_seeds_is_so():
    claims, _ = load_claims()
    records, _ = load_current(profile="tiny")
    values = {
        claim.id: claim.values([r for r in records if r.experiment == claim.experiment])
        for claim in claims
        if claim.profile == "tiny"
    }
    for name in ("judge-length", "p-yes-collapse-std"):
        assert max(values[name]) < 0, (name, "in every seed")
    below = [value < 0 for value in values["diversity-accuracy"]]
    assert 0.6 * len(below) < sum(below) < len(below), "on the wrong side in most seeds"
    assert min(values["p-yes-reward-rises"]) > 0, "every run"
    assert [value > 0 for value in values["verify-helps-answers"]].count(False) == 1, (
        "in all runs but one"
    )
    assert abs(median(values["diversity-accuracy"])) < 0.015, "about a hundredth"
    assert max(values["p-yes-tracks"]) < -0.05, "every seed lies below"
    assert max(values["truth-10"]) < -0.05, "still by more than the 0.05"
    moved = sorted(values["generate-flat"])
    assert 0 < moved[0] < 0.05 and 0.2 < moved[-1] < 0.3, "a few hundredths, a quarter"
    falls = sorted(values["p-yes-collapse"])
    assert falls[0] < -0.1 and falls[-1] > -0.02, "in some runs it falls, others are at their best"
    assert min(values["early-stopping"]) > -0.05, "not much below 0"

    def change(arm):
        runs = [r for r in records if (r.experiment, r.arm) == ("verification", arm)]
        return median(r.change("eval/pass@1") for r in runs)

    assert 0.04 < change("self-verify") / change("generate") < 0.06, "a twentieth"
    cured, rest = (
        {r.seed: r.evaluation["fell"] for r in records if (r.experiment, r.arm) == ("meta", arm)}
        for arm in ("truth 10 %", "our defaults")
    )
    common = [seed for seed in cured if seed in rest]
    assert sum(cured[seed] < rest[seed] for seed in common) > len(common) / 2, "in most seeds"


def test_who_is_ahead_in_07_is_ahead_in_its_table():
    (cell,) = (c for c in read(FOLDER / "07_results.ipynb").cells if c.id == "equal")
    page = BeautifulSoup(cell.outputs[1].data["text/html"], "html.parser")
    rows = {r.th.text: [float(cell.text) for cell in r("td")] for r in page.tbody("tr")}
    step, tokens, seconds = ({arm: row[i] for arm, row in rows.items()} for i in range(3))
    plain, diversity, judge, verified, unlabelled = step
    assert abs(step[plain] - step[judge]) < 0.015 and step[plain] > step[diversity]
    assert step[diversity] > step[verified] > step[unlabelled]
    assert all(abs(step[arm] - tokens[arm]) < 0.02 for arm in rows if arm != unlabelled)
    assert max(seconds, key=seconds.get) == plain


def test_the_numbers_that_the_prose_of_03_takes_from_its_table_stand_in_it():
    cells = {cell.id: cell for cell in read(FOLDER / "03_llm_judge_reward.ipynb").cells}
    page = BeautifulSoup(cells["style-table"].outputs[0].data["text/html"], "html.parser")
    names = [cell.text.strip() for cell in page.select("th.col_heading")]
    table = {
        row.th.text: dict(zip(names, [cell.text for cell in row("td")], strict=True))
        for row in page.tbody("tr")
    }
    for name in ("+ judge × 8", "judge only"):
        told = f"({table['assured'][name]} against {table['equations'][name]})"
        assert told in cells["hack-text"].source
    best = [max(table, key=lambda style: float(table[style][name])) for name in names]
    assert best.count("assured") == 2 and len(names) == 6  # "under two of six"


def test_the_numbers_that_the_prose_of_05_takes_from_its_run_stand_in_its_outputs():
    cells = {cell.id: cell for cell in read(FOLDER / "05_meta_evaluation.ipynb").cells}

    def told(name):
        return BeautifulSoup(text_of(cells[name].outputs), "html.parser").get_text(" ")

    assert "pass@1=0.26" in told("runs") and "0.40 to 0.87" in cells["long-read"].source
    assert "falls, to 0.26" in " ".join(cells["long-read"].source.split())
    assert "18 - 7 = 9" in told("what") and "18 − 7 = 9" in cells["what-read"].source
    wrong = re.search(r"a sum is wrong\W+n?\W*(\d+)\W+n?\W*(\d+)", told("what"))
    assert 0.7 < int(wrong[2]) / 256 < 0.8  # "in three of four a sum is wrong"
    assert "(AUC 0.50)" in cells["after-read"].source and "0.50" in told("evaluators")


def test_the_numbers_that_the_prose_of_06_takes_from_its_run_stand_in_its_outputs():
    cells = {cell.id: cell for cell in read(FOLDER / "06_flow_grpo.ipynb").cells}
    lines = cells["held-out"].outputs[0].data["text/plain"].split("\n")[1:]
    rows = {name.strip(): numbers.split() for name, *numbers in (
        re.fullmatch(r"(.*?)((?:\s+[\d.]+)+)\s*", line).groups() for line in lines
    ) for numbers in [numbers[0]]}  # fmt: skip
    told = " ".join(cells["held-out-read"].source.split())
    sampled, greedy = rows["success, plans sampled"], rows["success, greedy plans"]
    assert f"{sampled[0]} of the episodes, its likeliest plans only in {greedy[0]}" in told
    assert f"it is {sampled[2]} and {greedy[2]}" in told and greedy[1] == greedy[2]
    assert f"samples are at {sampled[1]}" in told
    first, _, last = (float(n) for n in rows["turns an episode"])
    assert f"with {last:.1f} turns in place of {first:.1f}" in told
    repeats = rows["turns that repeat a call"]
    assert f"({repeats[0]} → {repeats[2]} of the turns)" in told
    page = text_of(cells["token-in"].outputs)
    assert (
        "temperature 1: 0 of 38" in page
        and "At temperature 1 nothing" in cells["train-text"].source
    )
    append = re.search(r"append: .*?(\d+) of (\d+) episodes", text_of(cells["contexts"].outputs))
    assert 0.36 < int(append[1]) / int(append[2]) < 0.44  # "four in ten"
    assert "Four in ten" in cells["contexts-read"].source


def test_what_the_prose_of_08_says_of_engines_and_memory_is_so():
    told = {c.id: " ".join(c.source.split()) for c in read(FOLDER / "08_scale_out.ipynb").cells}
    engines = reported("engines")
    found = engines["difference"]["TRL"]["eval/pass@1"]
    assert found["n"] == 5 and -0.02 < found["low"] < 0 < found["high"] < 0.02
    assert "by less than 0.02 in pass@1" in told["fields-text"] and "0.02" in told["summary"]
    kit, theirs = (engines["final"][arm]["seconds"]["median"] for arm in ("kit", "TRL"))
    assert 2 < theirs / kit < 3 and "more than twice the seconds" in told["fields-text"]

    paper, one = PROFILES["paper"], plan(PROFILES["paper"], gpu="H100")
    assert plan(paper, gpu="A100-40").room < 0 < one.room and "On 40 GB" in told["plan-read"]
    assert max(one.memory, key=one.memory.get) == "activations"
    many = plan(paper, gpu="H100", gpus=8, engine="trl")
    assert many.total > one.total and "eight GPUs needs *more*" in told["plan-read"]
    beside = [plan(paper, gpu="H100", engine="trl+vllm", vllm_share=s).room for s in (0.3, 0.2)]
    assert beside[0] < 0 < beside[1] and "does not fit for `paper`" in told["where-read"]
    assert REACHED == 0.3 and "a guess: 0.3" in told["plan-read"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_claims_that_a_notebook_shows_are_among_the_shipped_ones_and_as_they_are_now(path):
    judged, _ = reported_claims()
    for cell in code_cells(read(path)):
        if "reported_claims()" in cell.source:
            named = re.findall(r'"([a-z0-9-]+)"', cell.source.split("claims_text(")[1])
            table = claims_text(judged, *named).strip()
            assert table in cell.outputs[0].data["text/markdown"], "execute the notebook again"


# --- a run of each, and its exact outputs ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_every_cell_runs_by_papermill_on_smoke(path, tmp_path):
    (result,) = execute([path], tmp_path / "runs", profile="smoke")
    assert result.status == "ok", result.error
    assert not figures_not_shown(read(tmp_path / "runs" / path.name))
    assert (tmp_path / "runs" / path.stem / "result.json").is_file()


EXACT = "NBVAL_CHECK_OUTPUT"
with_exact = [path for path in NOTEBOOKS if EXACT in path.read_text(encoding="utf-8")]


def nbval(path: Path) -> subprocess.CompletedProcess:
    plugins = ("-p", "nbval.plugin", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "--nbval-lax", path.name],
        cwd=path.parent,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the others are not needed
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", with_exact, ids=[path.stem for path in with_exact])
def test_nbval_holds_exact_cells_to_their_committed_outputs(path, tmp_path):
    """Cells that sample or train are tagged `nbval-skip`: they differ from machine to machine."""
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    done = nbval(copy)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_nbval_sees_an_output_that_is_not_what_the_cell_prints(tmp_path):
    source = f"# {EXACT}\nprint(round(3**0.5 / 2, 3))"
    cell = nbformat.v4.new_code_cell(source, execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="0.867\n")]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    done = nbval(tmp_path / "wrong.ipynb")
    assert done.returncode == 1 and "0.867" in done.stdout and "0.866" in done.stdout


@pytest.mark.parametrize("path", with_exact, ids=[path.stem for path in with_exact])
def test_no_exact_cell_is_skipped(path):
    for cell in code_cells(read(path)):
        assert not (EXACT in cell.source and "nbval-skip" in cell.metadata.get("tags", []))
