"""The benchmark's report and its bad input; what it measures is never a test."""

import pytest

from grpo_kit import bench


def test_the_report_tells_generation_and_update_apart():
    text = bench.report(
        {
            "step": {
                "completions": 128,
                "max_completion_length": 64,
                "steps": 3,
                "threads": 1,
                "median_seconds": {
                    "trl step": 3.0,
                    "trl generation": 2.0,
                    "kit step": 1.0,
                    "kit generation": 0.75,
                },
                "trl_over_kit": 3.0,
            },
            "loss_memory": {
                "vocabulary": 1000,
                "tokens": 5,
                "peak_mib": {"plain": 100.0, "chunked": 25.0},
                "chunked_over_plain": 0.25,
            },
        }
    )
    assert "| trl | 2.000 | 1.000 | 3.000 |" in text
    assert "| kit | 0.750 | 0.250 | 1.000 |" in text
    assert "3.00 times" in text and "(25%)" in text


def test_no_step_is_no_benchmark(tmp_path):
    with pytest.raises(ValueError, match="steps is 0"):
        bench.run(tmp_path, tmp_path, steps=0)
