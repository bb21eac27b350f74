"""Chaos: runs that are killed, stopped, starved and damaged at random moments, and taken up again.

    python tests/chaos.py 200 [FIRST SEED [FILE]]

makes that many trials on the CPU and adds their counts to FILE (data/results/chaos.json).

A trial starts a run, does something to it at a random moment, again and again, and resumes it until
it ends; in half of the trials the clock jumps as well. It must end as the unbroken run, bit for bit
(weights, and history but for times). Where a file of the kit's was damaged it may refuse instead,
in a sentence that names the file, and leave all as it was.
Children are forked from this process, which has loaded all that takes seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products, on a GPU

import nbformat
import torch
from toy import weights_of, without_times

from grpo_kit import trl_bridge
from grpo_kit.course import runner
from grpo_kit.flow import FlowGRPO
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.grid import run_grid
from grpo_kit.paths import write_atomic
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.runs import CHECKPOINT, HISTORY
from grpo_kit.self_verification import SelfVerification
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import train

RESULTS = Path(__file__).resolve().parents[1] / "data" / "results" / "chaos.json"
PROFILE = PROFILES["smoke"]
if (device := os.environ.get("GRPO_KIT_CHAOS_DEVICE", "cpu")) != "cpu":
    PROFILE = dataclasses.replace(PROFILE, device=device)
    torch.use_deterministic_algorithms(True, warn_only=True)
CONFIG = dataclasses.replace(
    PROFILE.config, max_steps=5, save_steps=1, eval_steps=2, eval_prompts=4, num_generations=4,
    generation_batch_size=16, max_completion_length=32,
)  # fmt: skip
END, SAID = "end.json", "said.txt"
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent ends
PATIENCE = 45  # seconds until a run counts as hung
# Python's `Thread.start` waits for ever for a thread that dies of want of memory as it begins.
HUNG = "memory limit, and SIGKILL as it hung in `Thread.start`"
ATTEMPTS = 12  # of a trial that something is done to; the next one is left alone


def _plain(folder: Path, seed: int, resume: bool, train=train, **options):
    policy = PROFILE.load_policy()
    rewards = [accuracy_reward, format_reward]
    options |= {"output_dir": folder, "seed": seed, "resume": resume}
    return end_of(policy, train(policy, PROFILE.load_task(), rewards, CONFIG, **options))


def end_of(policy, run) -> list[str]:
    digest = hashlib.sha256(weights_of(policy).numpy().tobytes()).hexdigest()
    return [digest, json.dumps(without_times(run.history))]


def _grid(folder: Path, seed: int, resume: bool):
    """Two runs of an experiment; of a finished one its record is what counts."""
    config = dataclasses.replace(CONFIG, max_steps=2)
    profile, experiment = dataclasses.replace(PROFILE, config=config), EXPERIMENTS["basic"]
    options = {"results": folder / "results", "work": folder / "work", "arms": ["plain"]}
    records = run_grid("basic", experiment, profile, [seed, seed + 1], **options)
    records = [
        dataclasses.replace(r, seconds=0, finished="", history=without_times(r.history))
        for r in records
    ]
    return [json.dumps(dataclasses.asdict(record)) for record in records]


def _flow(folder: Path, seed: int, resume: bool):
    policy = PROFILE.load_policy()
    source = partial(FlowGRPO, system=PROFILE.load_agents(policy, max_turns=3))
    config = dataclasses.replace(CONFIG, eval_prompts=0, max_completion_length=48)
    options = {"output_dir": folder, "seed": seed, "resume": resume, "batch_source": source}
    return end_of(policy, train(policy, tool_questions(), [accuracy_reward], config, **options))


def _two_processes(folder: Path, seed: int, resume: bool):
    """Both ranks of a run by TRL; the second ends with the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = os.fork()
    rank = "1" if other == 0 else "0"
    if other == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2"}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    trl_bridge.join("cpu")
    end = _plain(folder, seed, resume, train=trl_bridge.train)
    trl_bridge.leave()
    if other == 0:
        os._exit(0)
    os.waitpid(other, 0)
    return end


def _notebook(folder: Path, seed: int, resume: bool):
    """A run in the kernel of a notebook, which goes on from what an earlier kernel left."""
    path = folder.parent / "chaos.ipynb"
    parameters = nbformat.v4.new_code_cell('PROFILE, OUTPUT_DIR = "smoke", ""')
    parameters.metadata["tags"] = ["parameters"]
    run = nbformat.v4.new_code_cell(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport chaos\n"
        f"chaos.in_kernel(OUTPUT_DIR, {seed})"
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[parameters, run]), path)
    (result,) = runner.execute([path], folder, "smoke")
    if result.error:
        raise RuntimeError(result.error)
    return json.loads((folder / "chaos" / END).read_text())


def in_kernel(folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    end = _plain(Path(folder), seed, resume=True)
    Path(folder, END).write_text(json.dumps(end))


VERIFY = partial(SelfVerification, strategy="verify-alter")
KINDS: dict[str, Callable] = {
    "plain": _plain, "verification": partial(_plain, batch_source=VERIFY), "flow": _flow,
    "TRL": partial(_plain, train=trl_bridge.train), "grid": _grid,
    "two processes": _two_processes, "notebook": _notebook,
}  # fmt: skip


def child(kind: str, folder: Path, seed: int, resume: bool, clock=None) -> int:
    """Fork a process that makes the run and notes how it ended; its id.

    `clock`: draws by how much its clock is wrong, decades to and fro, whenever it is read.
    """
    if pid := os.fork():
        return pid
    code, now = 1, time.time
    if clock:
        time.time = lambda: now() + clock.uniform(-1e9, 1e9)
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        (folder.parent / END).write_text(json.dumps(KINDS[kind](folder, seed, resume)))
        code = 0
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        # whole or not at all: a second process may be killed as it says the same
        write_atomic(folder.parent / SAID, f"{type(error).__name__}: {error}")
        code = 3
    finally:
        os._exit(code)


def one_of(pid: int, draw: random.Random) -> int:
    """The process or one that it has started: a worker, the second rank, a kernel."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:  # it has just ended
        children = []
    return draw.choice([pid, *map(int, children)])


def wait(pid: int, seconds: float | None = None) -> int | None:
    """The exit status of a child; None if it still runs after so long."""
    until = time.monotonic() + (seconds if seconds is not None else 600)
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


# --- what is done to a running process, at a random moment ----------------------------------------


def _stop(pid: int, draw: random.Random) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(draw.uniform(0, 0.1))
    os.kill(pid, draw.choice((signal.SIGCONT, signal.SIGKILL)))


def _little_memory(pid: int, draw: random.Random) -> None:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + draw.randrange(1 << 24)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def _full_disk(pid: int, draw: random.Random) -> None:
    """No file may grow beyond a size, from some of the first bytes to a whole checkpoint's."""
    limit = int(10 ** draw.uniform(2, 7.3))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


DONE = {
    "SIGKILL": lambda pid, draw: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda pid, draw: os.kill(pid, signal.SIGTERM),
    "SIGSTOP": _stop, "memory limit": _little_memory, "full disk": _full_disk,
}  # fmt: skip

torch.set_num_threads = lambda threads: None  # in a fork it may fail; and it is one anyway

# --- what is done to a file between two attempts --------------------------------------------------


def _flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(max(1, len(content) - 4000))
    return content[:at] + bytes(4000) + content[at + 4000 :]


DAMAGES = {
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "one bit flipped": _flipped, "4,000 bytes zeroed": _zeroed,
    "another file's content": lambda content, draw: draw.randbytes(len(content)),
}  # fmt: skip


def files_of(folder: Path) -> dict[str, str]:
    """Digests of a run's files, but for the lock and what a killed writer left unfinished."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def files_to_damage(folder: Path) -> list[str]:
    """A run's checkpoint and history; of a run by TRL its history."""
    if (folder / CHECKPOINT).exists():
        return [CHECKPOINT, HISTORY]
    return [HISTORY] if trl_bridge.last_checkpoint(folder) else []


class Chaos:
    """Trials against unbroken runs, in `folder`; `tried` and `failures` count them."""

    def __init__(self, folder: Path, kinds=tuple(KINDS)):
        self.folder, self.kinds = folder, kinds
        self.tried, self.failures = Counter(), []
        self.whole: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def unbroken(self, kind: str) -> None:
        """Make the run that those of its kind must equal."""
        place, start = self.folder / f"whole-{kind}", time.monotonic()
        place.mkdir()
        code = wait(child(kind, place / "run", seed=0, resume=False))
        said = (place / SAID).read_text() if (place / SAID).exists() else "nothing said"
        assert code == 0, f"{kind}: the unbroken run ended with {code}: {said}"
        self.seconds[kind] = time.monotonic() - start
        self.whole[kind] = (place / END).read_text()

    def trial(self, seed: int) -> None:
        """One run, from its start to its end, with all that happens to it in between."""
        draw = random.Random(seed)
        kind, place = draw.choice(self.kinds), self.folder / f"trial-{seed}"
        if kind not in self.whole:
            self.unbroken(kind)
        damage = draw.choice([None, None, *DAMAGES])
        clock = random.Random(f"clock {seed}")  # in half of the trials
        clock = clock if clock.random() < 0.5 else None
        self.tried[kind, "clock that jumps"] += bool(clock)
        place.mkdir()
        folder, trouble = place / "run", None
        for attempt in range(ATTEMPTS + 1):
            pid = child(kind, folder, seed=0, resume=attempt > 0, clock=clock)
            name = draw.choice(tuple(DONE)) if attempt < ATTEMPTS else None
            code = wait(pid, draw.uniform(0, 0.6 * self.seconds[kind]) if name else None)
            if code is None:
                self.tried[kind, name or "left alone"] += 1
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # just ended
                    DONE[name](one_of(pid, draw), draw) if name else os.kill(pid, signal.SIGKILL)
                code = wait(pid, PATIENCE)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                code = wait(pid)
                if name != "memory limit":
                    trouble = f"hung after {name or 'nothing'}"
                    break
                self.tried[kind, HUNG] += 1
            if code == 0:
                break
            said = (place / SAID).read_text() if code == 3 else ""
            if code == 3 and name is None:
                trouble = f"refused to go on: {said}"
                break
            if code == 1:
                trouble = "ended in an error that nobody caught"
                break
            if damage and files_to_damage(folder) and draw.random() < 0.3:
                trouble = self.damaged(kind, place, damage, draw)
                damage = None
                if trouble is not None:
                    break
        if trouble is None and (place / END).read_text() != self.whole[kind]:
            trouble = "ended otherwise than the unbroken run"
        if trouble:
            self.failures.append({"seed": seed, "kind": kind, "what": trouble})
        else:
            shutil.rmtree(place)

    def damaged(self, kind: str, place: Path, damage: str, draw: random.Random) -> str | None:
        """Damage a file, try to resume, and put the file back: what went wrong, or None."""
        folder = place / "run"
        file = draw.choice(files_to_damage(folder))
        content = (folder / file).read_bytes()
        if not content:
            return None
        self.tried[kind, f"{file}: {damage}"] += 1
        (folder / file).write_bytes(DAMAGES[damage](content, draw))
        before = files_of(folder)
        code = wait(child(kind, folder, seed=0, resume=True))
        if code == 0:  # it was not needed, or the same in effect
            same = (place / END).read_text() == self.whole[kind]
            return None if same else f"{file} ({damage}): went on to another end"
        said = (place / SAID).read_text() if code == 3 else f"exit code {code}"
        if code != 3 or "\n" in said.strip() or file not in said:
            return f"{file} ({damage}): no sentence that names it, but: {said}"
        if files_of(folder) != before:
            return f"{file} ({damage}): refused, and changed other files"
        (folder / file).write_bytes(content)
        return None


def main(trials: int, first: int = 0, results: Path = RESULTS) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = json.loads(results.read_text()) if results.exists() else {"faults": [], "trials": []}
    counts = Counter({(one["run"], one["fault"]): one["times"] for one in known["faults"]})
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder))
        # No bar: tqdm's lock is shared with forked children, and one may be killed that holds it.
        for number, seed in enumerate(range(first, first + trials), 1):
            chaos.trial(seed)
            print(f"[{number}/{trials}] {sum(chaos.tried.values())} faults", flush=True)
            faults = [
                {"run": run, "fault": fault, "times": times}
                for (run, fault), times in sorted((counts + chaos.tried).items())
            ]
            done = {"first": first, "trials": number, "failures": chaos.failures}
            record = {"faults": faults, "trials": [*known["trials"], done]}
            write_atomic(results, json.dumps(record, indent=1) + "\n")
    print(f"{sum(chaos.tried.values())} faults in {trials} trials: {len(chaos.failures)} failures")
    for failure in chaos.failures:
        print(json.dumps(failure))
    sys.exit(bool(chaos.failures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *map(Path, sys.argv[3:4]))
