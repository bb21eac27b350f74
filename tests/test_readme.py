"""What the README says was measured is what the result files hold, and what it names exists."""

import json
import re
from pathlib import Path

import pytest

from grpo_kit.bench import report
from grpo_kit.reproduction import compare
from grpo_kit.reproduction.seeds import summary_text
from grpo_kit.reproduction.skill_runs import skills_text
from grpo_kit.tiny.card import LIMITS

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text()
RESULTS = CHECKOUT / "data" / "results"


def stored(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def test_the_table_of_seeds_is_the_stored_summary():
    assert summary_text(stored("basic_grpo/summary.json")).strip() in README


def test_the_table_of_skills_is_the_stored_one():
    skills = stored("skills/skills.json")
    assert skills_text(skills).strip() in README
    accuracy = {
        name: [row[when]["eval/pass@1"] for when in ("before", "after")]
        for name, row in skills.items()
    }
    assert "All but *bare* rise." in README
    for name, (before, after) in accuracy.items():
        assert (after > before + 0.1) == (name != "bare"), name


@pytest.mark.parametrize("name", ["diversity", "judge"])
def test_the_tables_of_the_experiments_are_the_stored_ones(name):
    assert compare.summary_text(stored(f"{name}/summary.json")).strip() in README
    assert (RESULTS / name / "curves.png").stat().st_size > 10_000


def test_what_is_said_of_the_experiments_is_what_they_found():
    """In the README and in the prose of notebooks 02 and 03."""
    diversity, judge = stored("diversity/summary.json"), stored("judge/summary.json")
    for summary in (diversity, judge):
        assert summary["seeds"] == [0, 1, 2, 3, 4] and summary["config"]["max_steps"] == 80

    def rises(summary, arm, metric):
        values = summary["difference"][arm][metric]
        return (values["low"] > 0) - (values["high"] < 0)

    def median(summary, arm, metric="eval/pass@1"):
        return summary["final"][arm][metric]["median"]

    for arm in ("diversity", "only correct"):
        for metric in ("distance", "eval/mean_length"):
            assert rises(diversity, arm, metric) == 1, (arm, metric)
        assert rises(diversity, arm, "eval/pass@1") < 1 and rises(diversity, arm, "entropy") == 0
        assert -0.01 < diversity["difference"][arm]["eval/pass@1"]["median"] < 0
    before = stored("basic_grpo/summary.json")["metrics"]["eval/pass@8"]["before"]["median"]
    assert f"{before:.2f}" == "0.98" and "pass@8 is 0.98" in README
    assert -0.25 < diversity["difference"]["normalised first"]["eval/pass@1"]["median"] < -0.15

    assert rises(judge, "judge added", "judged") == 1
    assert rises(judge, "judge added", "eval/pass@1") < 1
    assert rises(judge, "judge added", "eval/mean_length") == -1
    plain = median(judge, "plain")
    for values in judge["curves"]["eval/pass@1"]["judge only"]["values"]:
        assert max(values) > values[0] + 0.2 and values[-1] < 0.15
    assert median(judge, "judge only", "judged") > 4.8
    assert median(judge, "judge x 8") < plain - 0.3
    assert abs(median(judge, "only correct") - plain) < 0.03
    assert 0.5 < median(judge, "KL") < plain - 0.2
    assert f"{median(judge, 'KL', 'assured'):.0%}" == "16%"
    held = judge["curves"]["eval/pass@1"]["KL"]
    for values in held["values"]:
        assert all(abs(v - 0.6) < 0.1 for s, v in zip(held["steps"], values, strict=True) if s > 20)
    assert f"{plain:.2f}" == "0.94" and min(judge["final"]["judge only"]["judged"]["values"]) > 4.7
    assert median(judge, "two judges", "assured") < 0.05
    ends = sorted(judge["final"]["two judges"]["eval/pass@1"]["values"])
    assert 0.15 < ends[0] and ends[3] < 0.65 < ends[4]
    assert sum(share < 0.7 for share in judge["final"]["judge only"]["assured"]["values"]) == 2


def test_the_benchmark_is_the_stored_one():
    assert report(stored("bench/bench.json")).strip() in README


def test_the_table_of_the_base_is_its_card():
    skills = json.loads((CHECKOUT / "data/tiny-base/card.json").read_text())["skills"]
    for skill, name, low, high in LIMITS:
        assert f"| {skill} | {name} | {skills[skill][name]:.3f} | {low:.2f}–{high:.2f} |" in README


def test_every_file_and_every_make_target_that_it_names_is_there():
    for target in re.findall(r"\]\(([^):#]+)\)", README):
        assert (CHECKOUT / target).exists(), target
    makefile = (CHECKOUT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", README, re.MULTILINE))
    assert len(targets) >= 4
    for pair in targets:
        assert re.search(rf"^{''.join(pair)}:", makefile, re.MULTILINE), pair
