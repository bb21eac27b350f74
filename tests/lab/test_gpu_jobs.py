"""The jobs of `grpo-kit gpu`, in the small form that they have on a CPU."""

import json
import sys
import time

import pytest
from typer.main import get_command

from grpo_kit.cli import app
from grpo_kit.course.runner import find_notebooks
from grpo_kit.lab import gpu
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.gpu import JOBS, Job
from grpo_kit.lab.planner import model_of
from grpo_kit.lab.records import CHECKOUT
from grpo_kit.paths import data_dir


def said(*lines):
    return {"said": list(lines), "seconds": 3.0}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Run jobs in this process; what they leave, and the lines on them."""

    def make(jobs, minutes=9.0):
        def in_this_process(name, file, seconds):
            try:
                content = jobs[name].make(file.parent)
            except RuntimeError as error:
                content = {"failed": True, "said": [f"failed, {error}"], "seconds": 1.0}
            file.write_text(json.dumps(content))
            return gpu.in_words(content)

        monkeypatch.setattr(gpu, "JOBS", jobs)
        monkeypatch.setattr(gpu, "_made", in_this_process)
        return list(gpu.run(minutes, tmp_path))

    return make


def test_stored_jobs_are_passed_over_and_failed_ones_are_made_again(made, tmp_path):
    def fails(results):
        raise RuntimeError("the card is gone")

    jobs = {"a": Job(5, lambda results: said("2 passed")), "b": Job(5, fails)}
    assert made(jobs) == ["a: 2 passed", "b: failed, the card is gone"]
    jobs["b"] = Job(5, lambda results: said("1 trial"))
    assert made(jobs) == ["a: stored", "b: 1 trial"]
    text = gpu.write_page(tmp_path).read_text()
    assert "| a | 2 passed (3 s) |" in text and "<!-- /runs -->" in text


def test_a_job_that_takes_too_long_is_left_for_the_next_time(made, monkeypatch):
    jobs = {
        "long": Job(500, lambda results: said("never")),
        "resumes": Job(500, lambda results: said("trained"), resumes=True),
        "short": Job(20, lambda results: said("shown")),
    }
    monkeypatch.setattr(gpu, "ON_GPU", True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    first, second, third = made(jobs, minutes=2)
    assert first == "long: takes about 500 s, left for the next time"
    assert second == "resumes: trained" and third == "short: shown"


STARTS_ANOTHER = """#!{python}
import subprocess, sys
late = "import time; time.sleep(2); open({left!r}, 'w')"
subprocess.run([sys.executable, "-c", late])
"""


def test_a_job_is_ended_with_all_that_it_has_started(tmp_path, monkeypatch):
    script, left = tmp_path / "python", tmp_path / "left"
    script.write_text(STARTS_ANOTHER.format(python=sys.executable, left=str(left)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    said = gpu._made("job", tmp_path / "job.json", 0.5)
    assert said == "the minutes are spent; what it has saved is taken up the next time"
    time.sleep(2.5)
    assert not left.exists()


def test_shares_of_the_limit_count_weights_cache_and_arithmetic():
    """The tiny base by hand: what sampling reads, what the update computes."""
    folder = str(data_dir() / "tiny-base")
    n, rows, length, prompt = model_of(folder).num_parameters(), 64, 10.0, 30.0
    taken = {"kit": {"generation": 2.0, "update": 4.0}}
    result = {"completions": rows, "mean_length": length, "prompt_length": prompt}
    result["median_seconds"] = taken
    limits = {"bandwidth": 1e6, "flops": 1e9}
    cache = 2 * 4 * (2 * 32) * 2  # keys and values, layers, width of two heads, 16 bits
    read = 2 * n + rows * (prompt + 5) * cache
    found = gpu.shares(folder, result, False, **limits)
    assert found["generation"] == pytest.approx(10 * read / 1e6 / 2)
    assert found["update"] == pytest.approx(6 * n * (640 + 8 * 30) / 1e9 / 4)
    assert gpu.shares(folder, result, True, **limits)["update"] < found["update"]


def test_every_job_is_a_command_that_this_version_knows(monkeypatch):
    """Each is parsed, so that a renamed option is found before a GPU is at hand."""
    calls = []

    def run(command, **options):
        calls.append(command[1:])
        return gpu.subprocess.CompletedProcess(command, 0, "\n".join(LINES))

    monkeypatch.setattr(gpu.subprocess, "run", run)
    said_by = {}
    for name, job in JOBS.items():
        if getattr(job.make, "func", None) is gpu.command:
            said_by[name] = job.make(data_dir())["said"]
    assert said_by["SVAMP, seed 0"] == ["test_set/strict 0.2"]
    kit = [call[2:] for call in calls if call[:2] == ["-m", "grpo_kit"]]
    assert len(calls) == 10 and len(kit) == 7
    executed = []
    for name, *options in kit:
        command = cli.commands[name]
        parsed = command.make_context(name, list(options)).params
        assert name != "run" or parsed["name"] in EXPERIMENTS
        if name == "reproduce":
            executed += find_notebooks(CHECKOUT / "notebooks", parsed["names"])
    assert sorted(executed) == find_notebooks(CHECKOUT / "notebooks")


cli = get_command(app)
LINES = ("2 passed", "most memory 3 GiB", '{"eval/greedy": 0.1}', "| test_set/strict | 0.2 |",
         "| test_set/strict/low | 0.1 |", "[1/2] 08_scale_out ok, 3.1 s", "12 trials")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["card", "step, SmolLM2", "chaos"])
def test_a_job_in_its_small_form_leaves_a_file_that_can_be_shown(name, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "JOBS", {name: JOBS[name]})
    (line,) = gpu.run(9, tmp_path)
    (file,) = tmp_path.glob("cpu/*.json")
    result = json.loads(file.read_text())
    assert "failed" not in result, line
    assert result["job"] == name and result["versions"]["torch"]
    assert f"| {name} |" in gpu.write_page(tmp_path).read_text()
