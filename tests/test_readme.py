"""What the README says was measured is what the result files hold, and what it names exists."""

import json
import re
from pathlib import Path

from grpo_kit.bench import report
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
