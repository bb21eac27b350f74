"""An experiment's records as tables and curves: pairs by seed, intervals, places that all reach."""

import dataclasses

import pytest

from grpo_kit.course.plots import arm_bands
from grpo_kit.lab.grid import Arm, Experiment
from grpo_kit.lab.summary import reported, summarise, summary_text

ARMS = {"plain": Arm(None), "diversity": Arm(None)}
TWO = Experiment("Which?", ARMS, curves=("reward", "eval/pass@1"))


def test_seeds_that_only_one_arm_has_are_not_paired(five):
    records = five([0.1, 0.2, 0.3], [0.2, 0.3, 0.4])
    records = [r for r in records if (r.arm, r.seed) != ("plain", 0)]
    summary = summarise(records, TWO)
    assert summary["final"]["diversity"]["eval/pass@1"]["n"] == 3
    assert summary["difference"]["diversity"]["eval/pass@1"]["n"] == 2
    alone = summarise([r for r in records if r.arm == "diversity"], TWO)
    assert list(alone["final"]) == ["diversity"] and alone["difference"] == {}
    with pytest.raises(ValueError, match="no arm of this experiment has a run: plain, diversity"):
        summarise([], TWO)


@pytest.mark.parametrize(
    ("plain", "other", "text"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.2], "+0.02 [-0.202, +0.242]"),
        ([0.1] * 5, [0.2] * 5, "+0.1 [+0.1, +0.1]"),
        ([0.1, 0.2], [0.3, 0.4], "+0.2 [+0.2, +0.2]"),
        ([0.1], [0.3], "+0.2"),
    ],
)
def test_a_difference_has_a_sign_and_from_two_seeds_on_an_interval(plain, other, text, five):
    lines = summary_text(summarise(five(plain, other), TWO)).splitlines()
    assert f"| pass@1 | {text} |" in lines


def test_what_an_arm_does_not_log_is_left_out_of_its_differences_and_dashed(make_record):
    """An arm that samples nothing after its first step has no entropy."""
    records = [make_record("plain", seed) for seed in range(5)]
    records += [make_record("diversity", s, evaluation={"eval/pass@1": 0.5}) for s in range(5)]
    summary = summarise(records, TWO)
    assert "entropy" not in summary["difference"]["diversity"]
    assert "| entropy | 0.2 [0.2, 0.2] | – |" in summary_text(summary)


def test_the_interval_of_a_share_leaves_no_range_and_that_of_a_length_or_difference_may(
    make_record,
):
    names = ("eval/pass@1", "eval/mean_length", "reward")

    def runs(arm, *values):
        return [make_record(arm, s, evaluation=dict.fromkeys(names, v))
                for s, v in enumerate(values)]  # fmt: skip

    summary = summarise(runs("plain", 0.0, 1.0) + runs("diversity", 1.0, 0.0), TWO)
    ends = {name: summary["final"]["plain"][name] for name in names}
    assert (ends["eval/pass@1"]["low"], ends["eval/pass@1"]["high"]) == (0, 1)
    assert ends["eval/mean_length"]["low"] == 0 and ends["eval/mean_length"]["high"] > 1
    assert ends["reward"]["low"] < 0 and ends["reward"]["high"] > 1
    assert summary["difference"]["diversity"]["eval/pass@1"]["low"] < -1


def test_a_step_without_any_score_in_one_seed_is_left_out_of_the_curves(make_record):
    records = [make_record("plain", seed) for seed in range(2)]
    records[1].history.insert(2, {"step": 1.5, "num_generated_tokens": 95, "reward": 0.4})
    curve = summarise(records, TWO)["curves"]["reward"]["plain"]
    assert curve["steps"] == [1, 2] and [len(values) for values in curve["values"]] == [2, 2]


def test_over_tokens_or_seconds_each_seed_has_places_of_its_own(make_record):
    def run(seed, *points):
        history = [
            {"num_generated_tokens": x, "eval/pass@1": y, "step": i, "step_time": float(i)}
            for i, (x, y) in enumerate(points)
        ]
        return make_record("plain", seed, history=[*history, {**history[-1], "step": 9}])

    records = [run(0, (0, 0.0), (100, 1.0)), run(1, (0, 0.5), (50, 0.5), (120, 0.5))]
    experiment = dataclasses.replace(TWO, curves=("eval/pass@1", "never"), x="num_generated_tokens")
    summary = summarise(records, experiment)
    assert summary["x"] == "num_generated_tokens" and summary["curves"]["never"] == {}
    curve = summary["curves"]["eval/pass@1"]["plain"]
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 100), "places that all seeds reach"
    assert curve["values"][0] == pytest.approx([x / 100 for x in curve["steps"]])
    assert set(curve["values"][1]) == {0.5}
    panel = arm_bands({"eval/pass@1": summary["curves"]["eval/pass@1"]}, summary["x"]).axes[0]
    assert panel.get_xlabel() == "generated tokens"
    over_time = summarise(records, experiment, "seconds")["curves"]["eval/pass@1"]
    assert over_time["plain"]["steps"][-1] == 2, "seed 0 took 0 + 1 + 1 seconds, seed 1 longer"


def test_what_is_stored_is_found_and_what_is_not_or_is_broken_is_said(make_record, tmp_path):
    path = make_record().write(tmp_path)
    assert reported("diversity", results=tmp_path)["profile"] == "tiny"
    command = "grpo-kit run judge --profile tiny --seeds 100-104"
    with pytest.raises(ValueError, match=f"`{command}` makes"):
        reported("judge", results=tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="no whole result file"):
        reported("diversity", results=tmp_path)
