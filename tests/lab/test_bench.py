"""The benchmark's numbers and tables; how fast it is, is never a test."""

import json

from grpo_kit.lab import bench
from grpo_kit.paths import data_dir

TINY = data_dir() / "tiny-base"


def measured(policy_dir, config, task, **options):
    """In place of a measurement: TRL takes three times the kit's seconds."""
    return {
        "completions": config.generation_batch_size, "steps": config.max_steps - 1, "threads": 1,
        "mean_length": config.max_completion_length / 2, "arithmetic": "bfloat16",
        "median_seconds": {"trl": {"step": 3.0}, "kit": {"step": 1.0}},
        "trl_over_kit": {"step": 3.0}, "peak_mib": {"trl": 4000.0, "kit": 100.0},
    }  # fmt: skip


def test_the_step_and_every_shape_are_measured_and_stand_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "compare_steps", measured)
    monkeypatch.setattr(bench, "make_model", lambda folder, name: folder)
    result = bench.run(tmp_path, TINY, steps=5)
    assert json.loads((tmp_path / "bench.json").read_text()) == result
    assert result["step"]["steps"] == 5 and result["step"]["trl_over_kit"]["step"] == 3.0
    assert [shape["name"] for shape in result["shapes"]] == ["tiny", "30 M", "SmolLM2"]
    assert all(shape["steps"] == 3 for shape in result["shapes"])
    text = bench.report(result)
    assert "| the shipped base | 128 | 32 | 3.00 | 1.00 | 3.00 | 4,000 | 100 |" in text
    assert "| SmolLM2 | 64 | 12 |" in text and result["machine"]["processor"] in text
