"""Run the course's notebooks without a browser: copies of them, with a profile injected, or in
place, fit to be committed. Papermill executes them; nothing here knows torch.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from grpo_kit.paths import make_output_dir, write_atomic, writing

# Two busy processes with two threads each on two cores ran 70 times slower than with one. A fixed
# hash seed keeps printed sets in one order.
KERNEL_ENV = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
METADATA = {  # of every committed notebook
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python",
                      "pygments_lexer": "ipython3"}}  # fmt: skip
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # by JupyterLab, by Colab
WIDGET = "application/vnd.jupyter.widget-view+json"
# tqdm's "[00:34<00:10,  1.23it/s": the elapsed and the remaining time, the rate.
TIMES = r" ?\[\d+(?::\d\d)+(?:<[^,\]]+(?:, *[^,\]]*/[^,\]]*)?|, *[^,\]]*/[^,\]]*)"
NOISE = (  # what differs from run to run, and what stands in its place
    (r"\x1b\[[0-9;]*[A-Za-ln-z]", ""),  # cursor moves; colours (m) stay
    (TIMES + r"\]", ""),
    (TIMES + r", *([^\]]*)\]", r" [\1]"),  # "reward=0.5", which was added to the bar, stays
    (r"(?m)^(\[\d+/\d+\] .*), \d+ s$", r"\1"),  # of a grid's runs
    (r"[^\s\"'(]*[/\\]ipykernel_\d+[/\\]\d+\.py", "{cell}"),  # Python's name of a cell
    (r"\b0x[0-9a-fA-F]{8,16}\b", "0x…"),
)


class Result(NamedTuple):
    """What became of one notebook: time in seconds, and the error that ended it, if any."""

    notebook: str
    seconds: float
    error: str = ""


def find_notebooks(folder: str | Path, names: Sequence[str] = ()) -> list[Path]:
    """Notebooks in `folder` in reading order, or those named: `01_basic_grpo(.ipynb)` or `01`.

    Raises ValueError for an unknown or ambiguous name and for a folder without notebooks.
    """
    paths = sorted(Path(folder).glob("*.ipynb"))
    if not paths:
        raise ValueError(f"there are no notebooks in {folder}: name their folder (--notebooks)")
    chosen, known = [], {path: (path.stem, path.stem.partition("_")[0]) for path in paths}
    for name in names:
        matches = [path for path in paths if Path(name).stem in known[path]]
        if len(matches) != 1:
            raise ValueError(f"{len(matches)} notebooks match {name!r}: {[p.stem for p in paths]}")
        chosen += matches
    return list(dict.fromkeys(chosen)) or paths


def usable_cores() -> int:
    """The cores that this process may use; the machine may have more."""
    return len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0))


def execute(
    notebooks: Sequence[str | Path],
    output_dir: str | Path,
    profile: str = "tiny",
    parameters: Mapping[str, Any] | None = None,
    in_place: bool = False,
    jobs: int | None = None,
) -> list[Result]:
    """Execute `notebooks`, `jobs` at a time (by default 2, 1 of one core); results in their order.

    A failed notebook stops no other. On Ctrl-C the running kernels are killed.

    Copies are executed into `output_dir/<name>.ipynb`, with `profile` and `parameters` injected;
    their own files go to `output_dir/<name>/`. With `in_place` nothing is injected, and a notebook
    that succeeded is replaced by what `scrub` leaves. Raises ValueError or RuntimeError before
    anything runs, if a notebook or the folder cannot be used, or another process uses it.
    """
    if find_spec("papermill") is None:
        raise RuntimeError('papermill is not installed: pip install "grpo-kit[notebooks]"')
    sources = {path: _read(path) for path in (Path(path).resolve() for path in notebooks)}
    jobs = jobs or min(2, usable_cores())
    with writing(output_dir, "notebook"), ThreadPoolExecutor(jobs) as pool:
        output_dir, futures, kernels = Path(output_dir).resolve(), [], []
        try:
            for path, source in sources.items():
                # A relative path says nothing about the machine.
                own_dir = os.path.relpath(make_output_dir(output_dir / path.stem), path.parent)
                injected = {"PROFILE": profile, "OUTPUT_DIR": own_dir, **(parameters or {})}
                progress = f"[{len(futures) + 1}/{len(sources)}] {path.stem}"
                given = source, path, output_dir, None if in_place else injected, kernels, progress
                futures.append(pool.submit(_result, *given))
            return [future.result() for future in futures]
        finally:  # a thread ends when its kernel does, which it may be about to start
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                _kill(kernels)
                time.sleep(0.2)


def _kill(kernels: Iterable[Any]) -> None:
    """Kill kernels and the processes that they started: each leads a process group."""
    for kernel in kernels:
        with suppress(OSError):  # it has just ended
            if kernel.has_kernel:
                os.killpg(kernel.provisioner.pgid, signal.SIGKILL)


def _result(
    source: Any, path: Path, output_dir: Path, parameters: Mapping | None, kernels: list,
    progress: str,
) -> Result:  # fmt: skip
    """Execute one notebook; without `parameters`, in place."""
    import nbformat

    print(f"{progress} ...\n", end="", flush=True)  # in one piece: other threads print, too
    start, problem = time.perf_counter(), ""
    try:
        executed = _run(source, path, output_dir / path.name, parameters or {}, kernels)
        if parameters is None:
            write_atomic(path, nbformat.writes(scrub(executed, path.parents[1])) + "\n")
    except Exception as error:  # a failed cell, a full disk: the others go on
        problem = _one_line(error)
    seconds = round(time.perf_counter() - start, 1)
    said = f"{progress} {'failed' if problem else 'ok'}, {seconds} s {problem}".rstrip()
    print(f"{said}\n", end="", flush=True)
    return Result(path.stem, seconds, problem)


def _read(path: Path) -> Any:
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # a parser may raise nearly anything on a file that is not its own
        raise ValueError(f"{path} cannot be read as a notebook: {_one_line(error)}") from error
    tags = [tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    if tags.count("parameters") != 1 or "injected-parameters" in tags:
        raise ValueError(f"{path.name} needs one cell tagged `parameters`, not injected: {tags}")
    return notebook


def _run(source: Any, path: Path, output: Path, parameters: Mapping, kernels: list) -> Any:
    """Execute a notebook into `output`, up to a cell that fails; its kernel joins `kernels`."""
    import papermill  # takes seconds
    from jupyter_client.manager import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        async def start_kernel(self, **options: Any) -> None:
            kernels.append(self)
            # What the user has set in the environment goes first.
            await self._async_start_kernel(env={**KERNEL_ENV, **os.environ}, **options)

    # Written after each cell, so under another name: a killed run leaves the old copy whole.
    partial = output.with_name(f".{output.stem}.partial.ipynb")
    try:
        return papermill.execute_notebook(
            source,
            re.sub(r"([{}])", r"\1\1", str(partial)),  # papermill formats it as a template
            parameters=parameters,
            kernel_name="python3",
            language="python",
            kernel_manager_class=Kernel,
            # Papermill's `cwd` would change the folder of this process, and of its other threads.
            resources={"metadata": {"path": str(path.parent)}},
            # Quiet: each kernel warns that it speaks TCP, on the loopback interface only.
            extra_arguments=["--log-level=ERROR"],
            progress_bar=False,
        )
    finally:
        if partial.exists():
            os.replace(partial, output)


def _one_line(error: Exception, width: int = 200) -> str:
    name, text = type(error).__name__, str(error)
    if hasattr(error, "exec_count"):  # papermill's error, which holds that of the cell
        name, text = f"cell [{error.exec_count}] {error.ename}", error.evalue
    return ": ".join([name, *text.strip().splitlines()[:1]])[:width]


def scrub(executed: Any, checkout: Path) -> Any:
    """Remove what tells one machine or minute from another; changes `executed` and returns it.

    Absolute paths become relative to `checkout`, or begin with `~`, `{env}` or `{tmp}`.
    """
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    patterns = [*NOISE, *_places(checkout)]

    def clean(text: str) -> str:
        for pattern, replacement in patterns:
            text = re.sub(pattern, replacement, text)
        return text

    executed.metadata = type(executed)(METADATA)
    for cell in executed.cells:
        tags = cell.metadata.get("tags", [])
        folded = FOLDED if "hide-input" in tags else {}
        cell.metadata = type(executed)({**({"tags": tags} if tags else {}), **folded})
        if cell.cell_type != "code":
            continue
        cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
        # How a stream is cut into messages is chance; of a redrawn line the last frame counts.
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = "\n".join(map(str.rstrip, clean(output.text).split("\n")))
            elif output.output_type == "error":
                output.evalue = clean(output.evalue)
                output.traceback = [clean(line) for line in output.traceback]
            else:
                texts = [k for k in output.data if k.startswith("text/") or "svg" in k]
                output.data.update({kind: clean(output.data[kind]) for kind in texts})
        cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return executed


def _places(checkout: Path) -> list[tuple[str, str]]:
    """Patterns of this machine's folders and what stands in their place."""
    folders = (Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix), checkout)
    names = {}
    for folder, name in zip(folders, ("~", "{tmp}", "{env}", "."), strict=True):
        names |= {str(folder.absolute()): name, str(folder.resolve()): name}
    # Longest path first, so that a checkout inside the home folder is not cut at the home.
    return [
        (rf"(?<![\w.~-]){re.escape(path)}(?![\w-])", names[path])
        for path in sorted(names, key=len, reverse=True)
        if path != "/"
    ]
