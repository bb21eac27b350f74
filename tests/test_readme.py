"""What the README says was measured is what the result files hold, and what it names exists."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

from grpo_kit.lab import scaling
from grpo_kit.lab.bench import report
from grpo_kit.lab.readme import parts, with_parts, write_results
from grpo_kit.lab.records import load
from grpo_kit.lab.skill_runs import skills_text
from grpo_kit.lab.statistics import power
from grpo_kit.lab.summary import reported
from grpo_kit.tiny.card import LIMITS

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text()
RESULTS = CHECKOUT / "data" / "results"


def stored(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def test_what_is_computed_in_the_readme_is_what_the_stored_runs_give():
    computed = parts()
    assert set(computed) == {"claims", "basic", "mutants"} and computed["claims"].count("\n") > 20
    assert with_parts(README, computed) == README, "`make results` renews it"
    with pytest.raises(ValueError, match="one part between <!-- claims -->"):
        with_parts(README.replace("<!-- claims -->", ""), computed)


def test_the_report_beside_the_results_is_what_the_stored_runs_give(tmp_path):
    """Figures by the numbers that they show, since fonts differ from machine to machine."""
    readme = tmp_path / "README.md"
    marks = [f"<!-- {name} --><!-- /{name} -->" for name in ("claims", "basic", "mutants")]
    readme.write_text("\nkept\n".join(marks))
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    write_results(readme, results)
    assert (results / "report.md").read_text() == (RESULTS / "report.md").read_text()
    assert not (results / "report.html").exists()
    assert "\nkept\n" in readme.read_text() and "**reproduced**" in readme.read_text()
    here, there = (folder / "figures" for folder in (results, RESULTS))
    names = {path.name for path in here.iterdir()}
    assert names == {path.name for path in there.iterdir()} and "tiny-variants.png" in names
    for name in names:
        drawn = [drawn_from(folder / name) for folder in (here, there)]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 16, f"`make results` draws {name} anew"


def test_the_rule_has_the_power_that_is_stated():
    judged = parts()["claims"].count("** |") - parts()["claims"].count("**not run here** |")
    assert 25 <= judged <= 35, "a table of thirty claims"
    for effect, told in ((2, 0.3), (3, 0.67), (4, 0.9)):
        assert power(effect, 5, judged) == pytest.approx(told, abs=0.05), effect
    assert power(2, 10, judged) > 0.95
    assert (
        "three times in\nten, one of three twice in three, one of four nine times in ten" in README
    )


def drawn_from(path: Path) -> str:
    """The hash of the numbers that a figure shows, which it carries as its description."""
    (text,) = re.findall(rb"tEXtDescription\x00([0-9a-f]{16})", path.read_bytes())
    return text.decode()


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


def test_what_is_said_of_the_experiments_is_what_they_found():
    """In the README and in the prose of notebooks 02 and 03."""
    diversity, judge = reported("diversity"), reported("judge")
    for summary in (diversity, judge):
        assert summary["seeds"]["plain"][:5] == [0, 1, 2, 3, 4]
        assert summary["config"]["max_steps"] == 80

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
        assert rises(diversity, arm, "styles") == 1, "a few more ways to answer"
    assert rises(diversity, "diversity", "eval/pass@1") == 0, "that accuracy differs may be chance"
    lengths = [diversity["final"][a]["eval/mean_length"]["values"] for a in ("plain", "diversity")]
    assert all(long > short for short, long in zip(*lengths, strict=True)), "in every seed"
    notebook = json.loads((CHECKOUT / "notebooks" / "02_diversity_reward.ipynb").read_text())
    told = " ".join("".join(cell["source"]) for cell in notebook["cells"])
    for arm in ("plain", "diversity"):
        assert diversity["seeds"][arm] == list(range(10)) and "tiny base, ten seeds" in told
    base = load(experiment="basic", profile="tiny")[0]
    before = statistics.median(record.history[0]["eval/pass@8"] for record in base)
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


def test_what_is_said_of_self_verification_is_what_was_found():
    """In the README and in the prose of notebook 04."""
    summary = reported("verification")
    assert all(seeds[:5] == [0, 1, 2, 3, 4] for seeds in summary["seeds"].values())
    assert summary["config"]["max_generated_tokens"] == 130_000
    final, difference = summary["final"], summary["difference"]

    def told(arm, metric):
        return f"{final[arm][metric]['median']:.2f}"

    assert told("self-verify", "verdicts/accuracy") == "0.96"
    starts = summary["curves"]["verdicts/accuracy"]["self-verify"]["values"]
    assert f"{sorted(values[0] for values in starts)[5]:.3f}" == "0.625"
    assert told("self-verify", "gained/generation") == "0.03"
    assert final["self-verify"]["gained/generation"]["low"] > 0
    assert told("generate", "gained/generation") == "0.55"
    gained = final["generate"]["gained/verification"]["values"]
    assert (f"{min(gained):.2f}", f"{max(gained):.2f}") == ("0.04", "0.26")
    assert told("generate", "gained/verification") == "0.09"
    assert (
        told("generate", "eval/pass@1") == "0.94" and told("self-verify", "eval/pass@1") == "0.43"
    )
    assert told("self-verify", "of_n/own_verdicts") == "0.97"
    assert told("self-verify", "of_n/majority") == "0.87"
    strategies = ("mixed", "verify-init", "verify-alter")
    for arm in strategies:
        assert difference[arm]["eval/pass@1"]["low"] < 0 > difference[arm]["eval/pass@1"]["median"]
        assert final[arm]["verdicts/accuracy"]["low"] > 0.88 < final[arm]["eval/pass@1"]["median"]
    whole = final["mixed"]
    for arm in ("mixed, unfiltered", "mixed, undiversified", "mixed, unbalanced"):
        for metric in ("eval/pass@1", "verdicts/accuracy"):
            assert final[arm][metric]["low"] <= whole[metric]["high"], (arm, metric)
            assert final[arm][metric]["high"] >= whole[metric]["low"], (arm, metric)


def test_what_is_said_of_p_yes_is_what_was_found():
    """In the README and in the prose of notebook 05."""
    summary = reported("meta")
    assert all(seeds[:5] == [0, 1, 2, 3, 4] for seeds in summary["seeds"].values())
    assert summary["config"]["max_steps"] == 120
    final, difference = summary["final"], summary["difference"]

    def ends(arm):
        return final[arm]["eval/pass@1"]

    assert (
        f"{ends('our defaults')['median']:.2f}" == "0.37"
        and final["our defaults"]["fell"]["low"] > 0
    )
    assert f"{ends('paper')['median']:.2f}" == "0.78"
    assert sum(value > 0.1 for value in final["paper"]["fell"]["values"]) == 2
    assert final["paper"]["fell"]["median"] < final["our defaults"]["fell"]["median"]
    ten = ends("truth 10 %")
    assert f"{ten['low']:.2f}" == "0.63" and f"{ten['high']:.2f}" == "0.83"
    assert 0.08 < final["truth 10 %"]["fell"]["low"] and final["truth 10 %"]["fell"]["high"] < 0.21
    for arm in ("ensemble", "other question"):
        assert ends(arm)["median"] < 0.4 and difference[arm]["fell"]["low"] > 0.1
    fell = [final[arm]["fell"]["median"] for arm in ("our defaults", "truth 1 %")]
    assert fell[1] > fell[0] and ends("truth 1 %")["low"] < ends("our defaults")["median"]
    for arm in difference:
        assert 0.74 < final[arm]["stopped early"]["median"] < 0.89, arm
        assert difference[arm]["p_yes"]["low"] > 0 > difference[arm]["eval/pass@1"]["high"], arm
    for values in summary["curves"]["eval/pass@1"]["our defaults"]["values"]:
        assert values[0] < 0.45 < 0.54 < max(values)


def test_what_is_said_of_flow_grpo_is_what_was_found():
    """In the README and in the prose of notebook 06."""
    flow = reported("flow")
    assert all(seeds[:5] == [0, 1, 2, 3, 4] for seeds in flow["seeds"].values())
    assert flow["config"]["max_steps"] == 24
    notebook = json.loads((CHECKOUT / "notebooks" / "06_flow_grpo.ipynb").read_text())
    (told,) = ["".join(c["source"]) for c in notebook["cells"] if c["id"] == "seeds-read"]
    prose = " ".join(README.split("**Flow-GRPO**")[1].split("![")[0].split())
    own, change = flow["final"]["trajectory"], flow["difference"]

    def before(metric):
        values = [by_seed[0] for by_seed in flow["curves"][metric]["trajectory"]["values"]]
        assert len(set(values)) == 1  # the same base, evaluated alike
        return values[0]

    curve = flow["curves"]["eval/pass@1"]["offline traces"]
    middle = [statistics.median(column) for column in zip(*curve["values"], strict=True)]
    offline_at = dict(zip(curve["steps"], middle, strict=True))
    for text in (prose, " ".join(told.split())):
        for metric in ("eval/pass@1", "eval/tool_errors"):
            assert f"{before(metric):.2f} to {own[metric]['median']:.2f}" in text
        assert (
            f"{own['eval/turns']['median']:.1f}" in text and f"{before('eval/turns'):.1f}" in text
        )
        assert f"{own['eval/greedy']['median']:.2f}" in text
        assert f"improves to {offline_at[16]:.2f}" in text
        assert f"slips to {offline_at[24]:.2f}" in text
        assert f"by {-change['per turn']['eval/pass@1']['median']:.2f} in the middle" in text
    assert min(own["eval/pass@1"]["values"]) > 0.8  # what was wanted of every seed
    at_16 = [values[2] for values in flow["curves"]["eval/pass@1"]["trajectory"]["values"]]
    slowest, *others = sorted(at_16)
    ended = own["eval/pass@1"]["values"][at_16.index(slowest)]
    assert curve["steps"][2] == 16 and min(others) > 0.845
    assert f"slowest is at {slowest:.2f} there, and at {ended:.2f} in the end" in prose
    taken = [
        sum(row.get("step_time", 0.0) for row in record.history if row["step"] <= 16)
        for record in load(None, "tiny", "flow")[0]
        if record.arm == "trajectory"
    ]
    assert f"{min(taken):.0f} to {max(taken):.0f} seconds" in prose
    assert f"to {min(own['eval/pass@1']['values']):.2f} at least" in " ".join(told.split())
    per_turn = flow["final"]["per turn"]["eval/pass@1"]["values"]
    assert all(a < b for a, b in zip(per_turn, own["eval/pass@1"]["values"], strict=True))
    # the finer print of the notebook
    told = " ".join(told.split())
    differences = [b - a for a, b in zip(per_turn, own["eval/pass@1"]["values"], strict=True)]
    assert round(128 * min(differences)) == 1 and "one episode of 128 in one seed" in told
    assert f"by {max(differences):.2f} in another" in told
    curves = {arm: curve["values"] for arm, curve in flow["curves"]["eval/pass@1"].items()}
    at_16 = {arm: statistics.median(v[2] for v in values) for arm, values in curves.items()}
    assert at_16["per turn"] >= at_16["trajectory"] and "At step 16 it was not behind" in told
    greedy = {arm: table["eval/greedy"]["median"] for arm, table in flow["final"].items()}
    assert greedy["per turn"] == greedy["trajectory"] and "greedy plans the medians are" in told
    assert f"({greedy['offline traces']:.2f} greedy)" in told
    final_only = change["final turn only"]["eval/pass@1"]
    assert f"only**: −{-final_only['median']:.2f}," in told
    assert final_only["low"] < 0 < final_only["high"]
    offline = flow["final"]["offline traces"]
    assert offline["gained/success"]["low"] > 0 and offline["eval/turns"]["median"] > 4
    assert f"{offline['eval/turns']['median']:.1f} turns" in " ".join(told.split())


def test_what_it_says_of_the_kit_beside_trl_is_so():
    final = reported("engines")["final"]
    said = {arm: of["eval/pass@1"] for arm, of in final.items()}
    kit, theirs = (f"{v['median']:.3g} [{v['low']:.3g}, {v['high']:.3g}]" for v in said.values())
    assert f"after 40 steps is {kit} with the kit and {theirs} with TRL" in README
    assert said["kit"]["low"] < said["TRL"]["high"] and said["TRL"]["low"] < said["kit"]["high"]


def test_the_benchmark_is_the_stored_one():
    assert report(stored("bench/bench.json")).strip() in README
    scaled = stored("bench/scaling.json")
    assert scaling.report(scaled).strip() in README
    steps = [row["median_seconds"] for row in scaled["rows"]]
    factors = [of["trl"]["step"] / of["kit"]["step"] for of in steps]
    told = f"{min(factors):.1f} to {max(factors):.1f} times as long, and nowhere less"
    assert told in README and min(factors) > 1
    assert stored("bench/bench.json")["step"]["trl_over_kit"]["step"] >= 2.5


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


def test_the_example_of_an_agent_runs(capsys):
    (code,) = re.findall(
        r"```python\n(.*?)```", README.split("### Agents")[1].split("\n### ")[0], re.S
    )
    exec(code, {})
    printed = capsys.readouterr().out
    assert (
        "step 1" in printed
        and "<answer>" in printed
        and ("lookup(" in printed or "calc" in printed)
    )
