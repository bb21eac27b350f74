"""The jobs of `grpo-kit gpu`, in the small form that they have on a CPU."""

import json
import re
import time

import pytest
from typer.main import get_command

from grpo_kit.cli import app
from grpo_kit.course.runner import find_notebooks
from grpo_kit.lab import gpu
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.gpu import JOBS, Job
from grpo_kit.lab.records import CHECKOUT


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Make jobs, programs of Python; the lines on them."""

    def make(jobs, minutes=9.0):
        for i, (name, (seconds, said, program, *rest)) in enumerate(jobs.items()):
            (tmp_path / f"{i}.py").write_text(program)
            jobs[name] = Job(seconds, said, str(tmp_path / f"{i}.py"), *rest)
        monkeypatch.setattr(gpu, "JOBS", jobs)
        return list(gpu.run(minutes, tmp_path))

    return make


def test_stored_jobs_are_passed_over_and_failed_ones_are_made_again(made, tmp_path):
    jobs = {"a": (5, "passed", "print('| 2 passed |')"), "b": (5, "trial", "1 / 0")}
    first = made(dict(jobs))
    assert first == ["a: 2 passed", "b: failed, ZeroDivisionError: division by zero"]
    jobs["b"] = (5, "trial", "print('1 trial')")
    assert made(jobs) == ["a: stored", "b: 1 trial"]
    (file,) = tmp_path.glob("cpu/a.json")
    result = json.loads(file.read_text())
    assert result["job"] == "a" and result["versions"]["torch"] and result["said"] == ["2 passed"]
    text = gpu.write_page(tmp_path).read_text()
    assert "| a | 2 passed (0 s) |" in text and "<!-- /runs -->" in text


def test_a_job_that_takes_too_long_is_left_for_the_next_time(made, monkeypatch):
    jobs = {
        "long": (500, "never", ""),
        "resumes": (500, "trained", "print('trained')", True),
        "short": (20, "shown", "print('shown')"),
    }
    monkeypatch.setattr(gpu, "ON_GPU", True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    first, second, third = made(jobs, minutes=2)
    assert first == "long: takes about 500 s, left for the next time"
    assert second == "resumes: trained" and third == "short: shown"


STARTS_ANOTHER = """
import subprocess, sys
late = "import time; time.sleep(2); open({left!r}, 'w')"
subprocess.run([sys.executable, "-c", late])
"""


def test_a_job_is_ended_with_all_that_it_has_started(tmp_path, monkeypatch):
    script, left = tmp_path / "starts.py", tmp_path / "left"
    script.write_text(STARTS_ANOTHER.format(left=str(left)))
    monkeypatch.setattr(gpu, "JOBS", {"job": Job(1, "said", str(script))})
    said = gpu._made("job", tmp_path / "job.json", 0.5)
    assert said == "the minutes are spent; what it has saved is taken up the next time"
    time.sleep(2.5)
    assert not left.exists()


def test_every_job_is_a_command_that_this_version_knows():
    """Each is parsed, so that a renamed option is found before a GPU is at hand."""
    executed, said = [], {}
    for job_name, job in JOBS.items():
        said[job_name] = [line for line in LINES if re.search(job.said, line)]
        first, module, *call = job.arguments.split()
        if module != "grpo_kit":
            known = module in ("pytest", "grpo_kit.lab.gpu") or (CHECKOUT / first).is_file()
            assert known, job.arguments
            continue
        name, *options = call
        parsed = cli.commands[name].make_context(name, options).params
        assert name != "run" or parsed["name"] in EXPERIMENTS
        if name == "reproduce":
            executed += find_notebooks(CHECKOUT / "notebooks", parsed["names"])
    assert said["SVAMP, seed 0"] == ["| test_set/strict | 0.2 |"] and all(said.values())
    assert sorted(executed) == find_notebooks(CHECKOUT / "notebooks")


cli = get_command(app)
LINES = ("2 passed", "most memory 3 GiB", '{"eval/greedy": 0.1}', "| test_set/strict | 0.2 |",
         "| test_set/strict/low | 0.1 |", "[1/2] 08_scale_out ok, 3.1 s", "12 trials",
         "0.40 s, TRL 0.90 s; 9 MiB, TRL 20 MiB")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step, SmolLM2", "chaos"])
def test_a_job_in_its_small_form_leaves_a_file_that_can_be_shown(name, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "JOBS", {name: JOBS[name]})
    (line,) = gpu.run(9, tmp_path)
    (file,) = tmp_path.glob("cpu/*.json")
    result = json.loads(file.read_text())
    assert "failed" not in result, line
    assert result["job"] == name and result["versions"]["torch"]
    assert f"| {name} |" in gpu.write_page(tmp_path).read_text()
