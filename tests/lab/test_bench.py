"""The benchmark's report and its bad input; what it measures is never a test."""

import json

import pytest

from grpo_kit.lab import bench, scaling
from grpo_kit.paths import data_dir

RESULT = {
    "machine": {"processor": "a CPU", "accelerator": "none"},
    "step": {
        "completions": 128, "max_completion_length": 64, "steps": 3, "threads": 1,
        "median_seconds": {
            "trl": {"generation": 2.0, "update": 1.0, "step": 3.0},
            "kit": {"generation": 0.75, "update": 0.25, "step": 1.0},
        },
        "trl_over_kit": {"generation": 2.67, "update": 4.0, "step": 3.0},
        "peak_mib": {"trl": 400.0, "kit": 100.0},
    },
    "reward_seconds": {"diversity": 0.25, "judge": 3.0, "step": 1.0},
    "episodes": {"batch": 64, "median_seconds": {"batched": 0.05, "single": 0.5},
                 "single_over_batched": 10.0},
    "loss_memory": {"vocabulary": 1000, "tokens": 5, "peak_mib": {"plain": 100.0, "chunked": 25.0},
                    "chunked_over_plain": 0.25},
}  # fmt: skip


def test_the_report_and_the_figure_tell_generation_and_update_apart():
    text = bench.report(RESULT)
    assert "| trl | 2.000 | 1.000 | 3.000 | 400 |" in text
    assert "| kit | 0.750 | 0.250 | 1.000 | 100 |" in text
    assert "| trl / kit | 2.67 | 4.00 | 3.00 | 4.00 |" in text
    assert "3.00 times" in text and "(25%)" in text
    assert "50 ms each where 64 are played together, 500 ms one at a time, 10.0 times" in text
    assert "diversity 0.250 s and judge 3.000 s, or 20% and 75% of a step" in text
    first, *_ = bench.figure(RESULT).axes
    assert [bar.get_width() for bar in first.patches] == [2.0, 0.75, 1.0, 0.25]


@pytest.mark.slow
def test_both_trainers_make_their_steps_in_turn(tmp_path):
    step = bench.compare_steps(data_dir() / "tiny-base", tmp_path, bench.step_config(2, 4, 8, 8))
    assert step["steps"] == 2 and 0 < step["mean_length"] <= 8
    assert set(step["peak_mib"]) == set(bench.TRAINERS)
    for name in bench.TRAINERS:
        seconds = step["median_seconds"][name]
        assert 0 < seconds["generation"] < seconds["step"] and seconds["update"] > 0


def measured(policy_dir, output_dir, config):
    """In place of a measurement: seconds of TRL twice the kit's, both growing with the length."""
    ours = 2e-3 * config.max_completion_length
    return {
        "completions": config.generation_batch_size, "steps": 3, "threads": 1,
        "max_completion_length": config.max_completion_length,
        "mean_length": config.max_completion_length / 2, "prompt_length": 30.0,
        "median_seconds": {"trl": {"step": 2 * ours}, "kit": {"step": ours}},
        "peak_mib": {"trl": 300.0, "kit": 200.0},
    }  # fmt: skip


@pytest.mark.parametrize("quick", [False, True])
def test_every_point_is_measured_and_told(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "compare_steps", measured)
    limits = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    monkeypatch.setattr(scaling, "measure_limits", lambda: limits)
    result = scaling.run(tmp_path, quick)
    stored = json.loads((tmp_path / "scaling.json").read_text())
    assert stored["rows"] == result["rows"] and len(stored["rows"]) == len(scaling.points(quick))
    assert scaling.points(cuda=True)[-1][1] == scaling.LARGE, "on a GPU a real model's size, too"
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    if quick:
        return
    sizes = [row["parameters"] / 1e6 for row in stored["rows"] if row["axis"] == "parameters"]
    assert [round(size, 1) for size in sizes] == [0.3, 0.9, 3.4, 10.7, 30.6]
    powers = stored["exponents"]["max_completion_length"]
    assert powers["kit"]["power"] == pytest.approx(1) and powers["kit"]["r2"] == pytest.approx(1)
    assert stored["exponents"]["num_generations"]["trl"]["power"] == pytest.approx(0, abs=1e-9)
    text = (tmp_path / "scaling.md").read_text()
    assert "| 30 M | 8 | 32 | 64 | 0.26 | 0.13 | 2.00 | 16,000 |" in text
    assert "to the power of 1.00 (trl, R² 1.00) and 1.00 (kit, R² 1.00)." in text


def test_a_power_is_found_and_how_well_it_fits():
    rows = [
        {"axis": "parameters", "parameters": n,
         "median_seconds": {"kit": {"step": n**0.5}, "trl": {"step": 3.0 + n % 2}}}
        for n in (10, 101, 1000, 10001)
    ]  # fmt: skip
    fits = scaling.exponents(rows)["parameters"]
    assert fits["kit"]["power"] == pytest.approx(0.5) and fits["kit"]["r2"] == pytest.approx(1)
    assert fits["trl"]["r2"] < 0.5


def test_the_stored_limits_are_those_of_todays_planner(tmp_path):
    stored = json.loads((data_dir() / "results" / "bench" / "scaling.json").read_text())
    models = {size: scaling.make_model(tmp_path / size[:3], size) for size in scaling.SIZES}
    for (axis, size, config), row in zip(scaling.points(), stored["rows"], strict=True):
        assert (axis, size, config.num_generations) == (
            row["axis"], row["size"], row["num_generations"]
        )  # fmt: skip
        limit = scaling.limit_of(models[size], config, stored["limits"], row)
        assert limit == pytest.approx(row["limit"])
    assert stored["exponents"] == scaling.exponents(stored["rows"])
