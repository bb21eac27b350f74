"""Several seeds of one configuration: the summary's arithmetic, and going on after a kill."""

import dataclasses
import json
import math

import pytest

from grpo_kit.config import PROFILES
from grpo_kit.plots import seed_curves
from grpo_kit.reproduction.seeds import interval, run_seeds, summarise, summary_text


def history(end: float) -> list[dict]:
    return [
        {"step": 0, "eval/pass@1": 0.25, "eval/pass@8": 0.9, "eval/n": 4},
        {"step": 1, "reward": end / 2, "step_time": 2.0},
        {"step": 2, "reward": end, "eval/pass@1": end, "eval/pass@8": 0.8, "eval/n": 4,
         "step_time": 3.0},
    ]  # fmt: skip


def test_interval_is_the_median_within_its_bootstrap_bounds():
    result = interval([0.1, 0.2, 0.3, 0.4, 0.9])
    assert result["median"] == 0.3 and result["n"] == 5
    assert 0.1 <= result["low"] <= 0.3 <= result["high"] <= 0.9
    assert interval([0.5] * 5) == {"median": 0.5, "low": 0.5, "high": 0.5, "n": 5}


def test_one_seed_has_no_interval_and_none_is_refused():
    assert math.isnan(interval([1.0])["low"])
    with pytest.raises(ValueError, match="no value"):
        interval([])


def test_summary_takes_first_and_last_rows_and_adds_up_the_seconds():
    histories = [history(0.7), history(0.8), history(0.9)]
    summary = summarise(histories)
    assert summary["metrics"]["eval/pass@1"]["before"]["median"] == 0.25
    assert summary["metrics"]["eval/pass@1"]["after"]["median"] == 0.8
    assert summary["seconds"]["median"] == 5.0
    assert "eval/n" not in summary["metrics"]
    about = {"seeds": [0, 1, 2], "profile": "x", "config": {"max_steps": 2}}
    text = summary_text({**summary, **about, "last": [rows[-1] for rows in histories]})
    assert "pass@1 of each seed after: 0.700, 0.800, 0.900." in text
    assert "3 seeds, 2 steps" in text and "| pass@1 | 0.250 [0.250, 0.250] | 0.800 [" in text


def test_curves_have_a_line_a_seed_and_the_median():
    reward, held_out = seed_curves([history(0.7), history(0.8)]).axes
    assert len(reward.lines) == 3 and reward.lines[-1].get_ydata()[-1] == pytest.approx(0.75)
    assert len(held_out.lines) == 2 * 3 and held_out.get_legend() is not None
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in (reward, held_out))
    with pytest.raises(ValueError, match="no run"):
        seed_curves([])


def even(prompts, completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def test_seeds_are_run_once_and_taken_up_where_they_stopped(saved_policy, tmp_path):
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy))
    config = dataclasses.replace(
        profile.config, max_steps=2, max_completion_length=6, eval_prompts=2, save_steps=1
    )
    first = run_seeds(profile, [even], config, [0, 1], tmp_path / "out")
    times = [row["step_time"] for row in first["last"]]
    again = run_seeds(profile, [even], config, [0, 1, 2], tmp_path / "out")
    assert [row["step_time"] for row in again["last"]][:2] == times  # not run again
    assert len(again["last"]) == 3 and again["last"][0] != again["last"][1]
    stored = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert stored["seeds"] == [0, 1, 2] and stored["last"] == again["last"]
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    assert "3 seeds" in (tmp_path / "out" / "summary.md").read_text()
