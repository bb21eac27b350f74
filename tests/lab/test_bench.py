"""The benchmark's report and its bad input; what it measures is never a test."""

import json

import pytest

from grpo_kit.lab import bench, scaling
from grpo_kit.lab.planner import shape_of
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES

RESULT = {
    "machine": {"processor": "a CPU", "accelerator": "none"},
    "step": {
        "completions": 128,
        "max_completion_length": 64,
        "steps": 3,
        "threads": 1,
        "median_seconds": {
            "trl": {"generation": 2.0, "update": 1.0, "step": 3.0},
            "kit": {"generation": 0.75, "update": 0.25, "step": 1.0},
        },
        "trl_over_kit": {"generation": 2.67, "update": 4.0, "step": 3.0},
        "peak_mib": {"trl": 400.0, "kit": 100.0},
    },
    "reward_seconds": {"diversity": 0.25, "judge": 3.0, "step": 1.0},
    "episodes": {
        "batch": 64,
        "median_seconds": {"batched": 0.05, "single": 0.5},
        "single_over_batched": 10.0,
    },
    "loss_memory": {
        "vocabulary": 1000,
        "tokens": 5,
        "peak_mib": {"plain": 100.0, "chunked": 25.0},
        "chunked_over_plain": 0.25,
    },
}


def test_the_report_and_the_figure_tell_generation_and_update_apart():
    text = bench.report(RESULT)
    assert "| trl | 2.000 | 1.000 | 3.000 | 400 |" in text
    assert "| kit | 0.750 | 0.250 | 1.000 | 100 |" in text
    assert "| trl / kit | 2.67 | 4.00 | 3.00 | 4.00 |" in text
    assert "3.00 times" in text and "(25%)" in text
    assert "50 ms each where 64 are played together, 500 ms one at a time, 10.0 times" in text
    assert "diversity 0.250 s and judge 3.000 s, or 20% and 75% of a step" in text
    panels = bench.figure(RESULT).axes
    titles = [axes.get_title() for axes in panels]
    assert "3.0×" in titles[0] and "peak" in titles[1] and "25%" in titles[2]
    assert [bar.get_width() for bar in panels[0].patches] == [2.0, 0.75, 1.0, 0.25]


def test_no_step_is_no_benchmark(tmp_path):
    with pytest.raises(ValueError, match="steps is 0"):
        bench.run(tmp_path, tmp_path, steps=0)


@pytest.mark.slow
def test_both_trainers_make_their_steps_in_turn(tmp_path):
    """The steps themselves, small: the benchmark must run; what it measures is no test's."""
    step = bench.compare_steps(data_dir() / "tiny-base", tmp_path, bench.step_config(2, 4, 8, 8))
    assert step["steps"] == 2 and 0 < step["mean_length"] <= 8 and set(step["peak_mib"]) == {
        "trl", "kit"
    }  # fmt: skip
    for name in bench.TRAINERS:
        seconds = step["median_seconds"][name]
        assert 0 < seconds["generation"] < seconds["step"] and seconds["update"] > 0


# --- how it scales --------------------------------------------------------------------------------


def measured(policy_dir, output_dir, config):
    """In place of a measurement: seconds of TRL twice the kit's, both growing with the length."""
    ours = 2e-3 * config.max_completion_length
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "mean_length": config.max_completion_length / 2,
        "prompt_length": 30.0,
        "steps": 3,
        "threads": 1,
        "median_seconds": {"trl": {"step": 2 * ours}, "kit": {"step": ours}},
        "peak_mib": {"trl": 300.0, "kit": 200.0},
    }


@pytest.mark.parametrize("quick", [False, True])
def test_every_point_is_measured_and_told(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "compare_steps", measured)
    limits = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    monkeypatch.setattr(scaling, "measure_limits", lambda: limits)
    result = scaling.run(tmp_path, quick)
    stored = json.loads((tmp_path / "scaling.json").read_text())
    assert stored["rows"] == result["rows"] and len(stored["rows"]) == len(scaling.points(quick))
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


def test_the_limit_is_the_planners():
    """A step of 0.8 M weights that must be read 64 times, and computed with 6 N a token."""
    policy = PROFILES["tiny"].load_policy()
    folder = data_dir() / "tiny-base"
    config = bench.step_config(3, 8, 128, 64)
    n = sum(p.numel() for p in policy.model.parameters())
    limits = {"bytes_per_second": 1e9, "flops_per_second": 1e15}  # reading is what takes time
    step = {"prompt_length": 30.0, "mean_length": 32.0}
    limit = scaling.limit_of(folder, config, limits, step)
    shape = shape_of(str(folder))
    assert shape.parameters == n
    read = 64 * 4 * n + 128 * 32 * (30 + 16) * shape.cache_bytes(4)
    assert limit["generation"] == pytest.approx(read / 1e9)
    tokens = 128 * 32 + 16 * 30
    assert limit["update"] == pytest.approx(6 * n * tokens / 1e15)
    assert limit["step"] == limit["generation"] + limit["update"]


def test_the_stored_limits_are_those_of_todays_planner(tmp_path):
    stored = json.loads((data_dir() / "results" / "bench" / "scaling.json").read_text())
    models = {size: scaling.make_model(tmp_path / size[:3], size) for size in scaling.SIZES}
    for (axis, size, config), row in zip(scaling.points(), stored["rows"], strict=True):
        assert (axis, size, config.num_generations) == (
            row["axis"], row["size"], row["num_generations"]
        )  # fmt: skip
        found = scaling.limit_of(models[size], config, stored["limits"], row)
        assert found == pytest.approx(row["limit"])
    assert stored["exponents"] == scaling.exponents(stored["rows"])


def test_on_a_gpu_there_is_one_of_a_real_models_size():
    assert [size for _, size, _ in scaling.points(cuda=True)][-1] == scaling.LARGE
