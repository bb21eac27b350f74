"""The benchmark's report and its bad input; what it measures is never a test."""

import pytest

from grpo_kit import bench

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


def test_the_report_tells_generation_and_update_apart():
    text = bench.report(RESULT)
    assert "| trl | 2.000 | 1.000 | 3.000 | 400 |" in text
    assert "| kit | 0.750 | 0.250 | 1.000 | 100 |" in text
    assert "| trl / kit | 2.67 | 4.00 | 3.00 | 4.00 |" in text
    assert "3.00 times" in text and "(25%)" in text
    assert "50 ms each where 64 are played together, 500 ms one at a time, 10.0 times" in text
    assert "diversity 0.250 s and judge 3.000 s, or 20% and 75% of a step" in text


def test_the_figure_shows_time_and_memory():
    titles = [axes.get_title() for axes in bench.figure(RESULT).axes]
    assert "3.0×" in titles[0] and "peak" in titles[1] and "25%" in titles[2]
    assert all(axes.get_xlabel() for axes in bench.figure(RESULT).axes)


def test_no_step_is_no_benchmark(tmp_path):
    with pytest.raises(ValueError, match="steps is 0"):
        bench.run(tmp_path, tmp_path, steps=0)
