"""What the report says: what the records say, whatever else lies in their folder."""

import pytest

from grpo_kit.lab.claims import judge_claims, load_claims
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.records import load
from grpo_kit.lab.report import write_report

CLAIMS = """
- {id: up, statement: Unlike answers are right more often., source: some paper, evidence: F,
   seed: "002", experiment: diversity, arm: diversity, against: plain, metric: eval/pass@1,
   expects: rises, printed: {GSM8K: [30, 45.5], MATH: [10, 12]}}
- {id: down, statement: They are right less often., source: a talk, experiment: diversity,
   arm: diversity, against: plain, metric: eval/pass@1, of: late, expects: falls}
- {id: even, statement: They are as sure., source: a talk, experiment: diversity, arm: diversity,
   against: plain, metric: entropy, expects: rises}
- {id: exact, statement: A share | of it., source: a talk, experiment: diversity, arm: plain,
   metric: eval/pass@1, expects: {value: 0.4, within: 0.1}}
- {id: elsewhere, statement: So it is on a GPU., source: a talk, experiment: flow, arm: trajectory,
   profile: paper, metric: eval/pass@1, expects: rises}
"""
WRONG = """
- {id: lost, statement: s, source: s, experiment: nonsense, arm: plain, metric: entropy,
   expects: rises}
- {id: unmeasured, statement: s, source: s, experiment: diversity, arm: plain, metric: joy,
   expects: rises}
"""
FLOW = {"experiment": "flow", "evaluator": EXPERIMENTS["flow"].evaluator}


@pytest.fixture(scope="session")
def write_runs(five):
    records = five([0.4, 0.41, 0.42, 0.43, 0.44], [0.6, 0.613, 0.626, 0.639, 0.652])
    return lambda folder: [record.write(folder) for record in records]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, write_runs):
    folder = tmp_path_factory.mktemp("inputs")
    write_runs(folder / "results")
    (folder / "claims.yaml").write_text(CLAIMS)
    return folder


@pytest.fixture(scope="module")
def written(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return write_report(folder, inputs / "results", inputs / "claims.yaml")


def test_verdicts_and_numbers_are_those_of_the_records(inputs, written):
    claims, _ = load_claims(inputs / "claims.yaml")
    judged, _ = judge_claims(claims, load(inputs / "results")[0])
    assert {one.claim.id: one.verdict for one in judged} == {
        "up": "reproduced", "down": "contradicted", "even": "no effect", "exact": "reproduced",
        "elsewhere": "not run here",
    }  # fmt: skip
    text = written.read_text()
    for one in judged:
        statement = one.claim.statement.replace("|", "\\|")
        line = next(line for line in text.splitlines() if statement in line)
        assert f"**{one.verdict}**" in line and f"({one.claim.id}; {one.claim.source})" in line
        assert one.here in line and (one.judgement is None or "(5 seeds, sd 0" in line)
    up = "| pass@1, diversity minus plain: +0.206 [+0.197, +0.215] "
    assert f"| rises; GSM8K: 30 → 45.5; MATH: 10 → 12 {up}" in text and "| 0.4 ± 0.1 |" in text
    assert "| 2 | 1 | 1 | 0 | 0 | 1 |" in text


def test_what_cannot_be_used_is_named_and_the_rest_comes_out(tmp_path, make_record, write_runs):
    results = tmp_path / "results"
    write_runs(results)
    cut = make_record("only correct").write(results)
    cut.write_text(cut.read_text()[:700])
    make_record("older", experiment="diversity").write(results)
    make_record("plain", experiment="forgotten").write(results)
    history = [{"step": 0, "reward": 1.0}]
    make_record("trajectory", history=history, **FLOW).write(results)
    (tmp_path / "claims.yaml").write_text(CLAIMS + WRONG)
    text = write_report(tmp_path / "out", results, tmp_path / "claims.yaml").read_text()
    problems = text.split("## Problems\n")[1].split("## ")[0]
    for problem in (
        str(cut), "'older'", "'forgotten'", "its history lacks steps or tokens", "claim 'lost'",
        "claim 'unmeasured': 'plain', seed 0, has no 'joy'",
    ):  # fmt: skip
        assert problem in problems, problem
    assert "Unlike answers are right more often." in text and "0.626 [0.6, 0.652]" in text


def test_folders_that_are_empty_or_cannot_be_written_are_named(inputs, tmp_path):
    text = write_report(tmp_path / "out", tmp_path / "none", inputs / "claims.yaml").read_text()
    assert f"No run is stored under {tmp_path / 'none'}" in text
    assert text.count("**not run here**") == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write to the output folder"):
        write_report(tmp_path / "file", inputs / "results", inputs / "claims.yaml")
