"""The speedrun's table and picture; how fast it is, is never a test."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_kit.lab import speedrun
from grpo_kit.paths import writing


def outcome(seed, seconds):
    return {"seed": seed, "seconds": seconds, "curve": [[9.0, 128, 0.5, 0.4, 0.6],
                                                        [20.0, 500, 0.93, 0.91, 0.95]]}  # fmt: skip


def test_entries_stand_by_their_median_and_stay_when_others_are_run(tmp_path, monkeypatch):
    seconds = {"trl": [90.0, 80.0, None], "kit": [31.0, 29.0, 35.0]}

    def run_entry(entry, seed, started):
        if seed == 103:
            raise OSError("it did not work")
        return outcome(seed, seconds[entry.engine][seed - 100])

    monkeypatch.setattr(speedrun, "run_entry", run_entry)
    monkeypatch.setattr(speedrun, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    entries = speedrun.ENTRIES
    speedrun.run(tmp_path, {"TRL": entries["TRL"]}, [100, 101, 102])
    result = speedrun.run(tmp_path, {"kit": entries["kit"]}, [100, 101, 102])
    medians = {name: entry["seconds"] for name, entry in result["entries"].items()}
    assert medians == {"TRL": 90.0, "kit": 31.0}
    assert json.loads((tmp_path / "speedrun.json").read_text()) == result
    head, _, first, second, *_, where = speedrun.report(result).splitlines()
    assert "seconds" in head and first.startswith("| kit | 31 | 31 / 29 / 35 |")
    assert second.startswith("| TRL | 90 | 90 / 80 / – |")
    assert where == f"On {result['entries']['kit']['machine']['processor']}."
    lines = speedrun.figure(result).axes[0].lines
    assert len(lines) == 7 and list(lines[0].get_xdata()) == [9.0, 20.0]

    with pytest.raises(RuntimeError, match=r"entry 'kit', seed 103, failed \(it did not work\)"):
        speedrun.run(tmp_path, {"kit": entries["kit"]}, [100, 103])
    with writing(tmp_path, "speedrun"), pytest.raises(RuntimeError, match="writes a speedrun to"):
        speedrun.run(tmp_path, {"kit": entries["kit"]}, [100])
    with pytest.raises(RuntimeError, match="entry 'TRL'"):
        speedrun.run(tmp_path, {"TRL": entries["TRL"]}, [103])
    stored = json.loads((tmp_path / "speedrun.json").read_text())
    runs = {name: len(entry["runs"]) for name, entry in stored["entries"].items()}
    assert runs == {"TRL": 3, "kit": 1}, "what has not run again stays"
    assert "| kit | 31 | 31 |" in speedrun.report(stored)


def test_an_entry_of_ones_own_is_a_config():
    entry = speedrun.own_entry(["learning_rate=3e-4", "bf16=true"], "trl", "larger steps")
    assert entry == speedrun.Entry("larger steps", {"learning_rate": 3e-4, "bf16": True}, "trl")
    with pytest.raises(ValueError, match="is not name=value"):
        speedrun.own_entry(["learning_rate"], "kit", "")


@pytest.mark.slow
def test_a_run_is_timed_from_the_start_of_its_process(monkeypatch):
    monkeypatch.setattr(speedrun, "TARGET", 0.1)  # the untrained base reaches it
    monkeypatch.setattr(speedrun, "SETTING", speedrun.SETTING | {"max_steps": 1, "eval_steps": 1})
    reached = speedrun.run_entry(speedrun.ENTRIES["kit"], 100, started=0.0)
    assert reached["seconds"] > 1e9 and [point[1] for point in reached["curve"]] == [128, 500]
    assert reached["curve"][-1][3] > 0.1
