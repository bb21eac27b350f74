"""The benchmark's reports and its points; what it measures is never a test."""

import json

import pytest

from grpo_kit.lab import bench, scaling, step_profile
from grpo_kit.paths import data_dir

RESULT = {
    "machine": {"processor": "a CPU", "accelerator": "none"},
    "step": {
        "completions": 128, "max_completion_length": 64, "steps": 3, "threads": 1,
        "arithmetic": "bfloat16",
        "median_seconds": {
            "trl": {"generation": 2.0, "update": 1.0, "step": 3.0},
            "kit": {"generation": 0.75, "update": 0.25, "step": 1.0},
        },
        "trl_over_kit": {"generation": 2.67, "update": 4.0, "step": 3.0},
        "peak_mib": {"trl": 400.0, "kit": 100.0},
    },
    "float32": {"trl_over_kit": {"step": 2.5}, "peak_mib": {"trl": 400.0, "kit": 300.0}},
    "reward_seconds": {"diversity": 0.25, "judge": 3.0, "step": 1.0},
    "episodes": {"batch": 64, "median_seconds": {"batched": 0.05, "single": 0.5},
                 "single_over_batched": 10.0},
    "loss_memory": {"vocabulary": 1000, "tokens": 5, "peak_mib": {"plain": 100.0, "chunked": 25.0},
                    "chunked_over_plain": 0.25},
}  # fmt: skip


def test_the_report_tells_generation_and_update_apart():
    text = bench.report(RESULT)
    assert "| trl | 2.000 | 1.000 | 3.000 | 400 |" in text
    assert "| kit | 0.750 | 0.250 | 1.000 | 100 |" in text
    assert "| trl / kit | 2.67 | 4.00 | 3.00 | 4.00 |" in text
    assert "3.00 times" in text and "2.50 times where both compute in float32" in text
    assert "bfloat16 arithmetic" in text and "(25%)" in text
    assert "50 ms each where 64 are played together, 500 ms one at a time, 10.0 times" in text
    assert "diversity 0.250 s and judge 3.000 s, or 20% and 75% of a step" in text


@pytest.mark.slow
def test_both_trainers_make_their_steps_in_turn():
    step = bench.compare_steps(data_dir() / "tiny-base", bench.step_config(2, 4, 8, 8))
    assert step["steps"] == 2 and 0 < step["mean_length"] <= 8
    assert set(step["peak_mib"]) == set(bench.TRAINERS)
    for name in bench.TRAINERS:
        seconds = step["median_seconds"][name]
        assert 0 < seconds["generation"] < seconds["step"] and seconds["update"] > 0


def test_every_point_is_measured_and_told(tmp_path, monkeypatch):
    def measured(policy_dir, config, size):
        """In place of a measurement: TRL takes twice the kit's seconds."""
        most = config.max_completion_length
        return {
            "completions": config.generation_batch_size, "steps": 3, "threads": 1,
            "max_completion_length": most, "mean_length": most / 2, "prompt_length": 30.0,
            "median_seconds": {
                "trl": {"step": 4e-3 * most},
                "kit": {"step": 2e-3 * most, "generation": 1e-3 * most, "update": 1e-3 * most},
            },
            "trl_over_kit": {"step": 2.0},
            "peak_mib": {"trl": 300.0, "kit": 200.0},
        }  # fmt: skip

    monkeypatch.setattr(bench, "compare_steps", measured)
    limits = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    monkeypatch.setattr(scaling, "measure_limits", lambda: limits)
    result = scaling.run(tmp_path)
    assert json.loads((tmp_path / "scaling.json").read_text()) == result
    assert len(result["rows"]) == len(scaling.points())
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    sizes = [row["parameters"] / 1e6 for row in result["rows"] if row["axis"] == "parameters"]
    assert [round(size, 1) for size in sizes] == [0.3, 0.9, 3.4, 10.7, 30.6]
    assert round(result["rows"][-1]["parameters"] / 1e6, 1) == 134.5  # SmolLM2-135M's
    line = scaling.report(result).splitlines()[6].split()
    assert line[:9] == ["30", "M", "8", "64", "32.0", "0.26", "0.13", "2.0", "16000.0"]


def test_the_stored_limits_are_those_of_todays_planner(tmp_path):
    stored = json.loads((data_dir() / "results" / "bench" / "scaling.json").read_text())
    sizes = {row["size"] for row in stored["rows"]} - {bench.SMOL}  # that one takes seconds
    models = {size: scaling.make_model(tmp_path / size[:3], size) for size in sizes}
    for (axis, size, config), row in zip(scaling.points(), stored["rows"], strict=True):
        group, most = row["num_generations"], row["max_completion_length"]
        assert (axis, size) == (row["axis"], row["size"])
        assert (config.num_generations, config.max_completion_length) == (group, most)
        if size != bench.SMOL:
            limit = scaling.limit_of(models[size], config, row["limits"], row)
            assert limit == pytest.approx(row["limit"])


def test_goals_are_judged_by_what_was_measured(tmp_path):
    assert bench.goals(tmp_path).count("\n") <= 3  # nothing measured, nothing said
    (tmp_path / "bench.json").write_text(json.dumps(RESULT))
    text = bench.goals(tmp_path)
    assert "| a step of the tiny base, TRL / kit | 3.00 | ≥ 4 | no |" in text
    assert "| its memory, kit / TRL | 0.25 | ≤ 0.6 | yes |" in text
    assert "| share of the embedding in a step | 0.20 | ≤ 0.2 | yes |" in text
    assert "64 together | 10.00 | ≥ 20 | no |" in text

    def row(size, ratio, seconds, kit):
        return {
            "size": size, "axis": "" if size == bench.SMOL else "parameters",
            "trl_over_kit": {"step": ratio}, "limit": {"step": 1.0},
            "median_seconds": {"kit": {"step": seconds}}, "peak_mib": {"trl": 8192, "kit": kit},
        }  # fmt: skip

    rows = [row("3 M", 1.9, 9, 4096), row("30 M", 3, 1.25, 1024), row(bench.SMOL, 7, 2, 4608)]
    scaling = {"rows": rows, "machine": RESULT["machine"]}
    (tmp_path / "scaling.json").write_text(json.dumps(scaling))
    text = bench.goals(tmp_path)
    assert "| every point of the grid, TRL / kit | 1.90 | ≥ 2 | no |" in text
    assert text.count("| its memory, kit / TRL |") == 2 and "| 0.50 | ≤ 0.6 | yes |" in text
    assert text.count("| the same in float32 |") == 2 and "| 0.75 | ≤ 0.6 | no |" in text
    assert "| share of the limit at 30 M | 0.80 | ≥ 0.6 | yes |" in text
    assert "| share of the limit at 135 M | 0.50 | ≥ 0.6 | no |" in text
    assert "| 135 M, TRL / kit | 7.00 | ≥ 6 | yes |" in text and "| its GiB | 4.50 |" in text
    for row in rows:
        row["limit"] |= {"generation": 0.4, "update": 0.4}
        row["median_seconds"]["kit"] |= {"generation": 1.0, "update": 0.8}
    scaling["machine"] = RESULT["machine"] | {"accelerator": "a GPU"}
    (tmp_path / "scaling.json").write_text(json.dumps(scaling))
    text = bench.goals(tmp_path)
    assert "| 135 M, generation, share of the limit | 0.40 | ≥ 0.5 | no |" in text
    assert "| 135 M, update, share of the limit | 0.50 | ≥ 0.45 | yes |" in text


def test_a_profile_tells_parts_and_operators_apart():
    rows = step_profile.profile_step(data_dir() / "tiny-base", bench.step_config(1, 4, 8, 8))
    assert {row["part"] for row in rows} == set(step_profile.PARTS)
    products = {row["part"]: row["calls"] for row in rows if row["operator"] == "aten::mm"}
    layers, steps = 4, 7  # after the prompts, a step for each token but the last
    assert products["sample"] >= layers * 3 * steps and products["backward"] > products["forward"]
    text = step_profile.report({"one": {"rows": rows}, "two": {"rows": rows}}, most=2)
    assert text.startswith("| milliseconds per step | one | two |") and text.count("the rest") == 4
