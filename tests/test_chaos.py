"""A little of `make chaos`: it passes, and it would notice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTICED = """
import sys, chaos, torch
from pathlib import Path
torch.set_num_threads(1)
trials = chaos.Chaos(Path(sys.argv[1]), kinds=("plain",))
trials.unbroken("plain")
trials.whole["plain"] = trials.whole["plain"].replace("0", "1", 1)
trials.trial(0)
(failure,) = trials.failures
assert failure["what"] == "ended otherwise than the unbroken run", failure
"""


def python(*arguments) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], cwd=Path(__file__).parent, check=True)


@pytest.mark.slow
def test_runs_survive_what_happens_to_them_and_another_end_is_noticed(tmp_path):
    results = tmp_path / "chaos.json"
    python("chaos.py", 3, 1_000_000, results)
    python("chaos.py", 1, 1_000_003, results)
    record = json.loads(results.read_text())
    assert [each["trials"] for each in record["trials"]] == [3, 1]
    assert not any(each["failures"] for each in record["trials"])
    assert sum(one["times"] for one in record["faults"]) >= 4
    python("-c", NOTICED, tmp_path)
