"""Run the course's notebooks without a browser; papermill executes them.

`execute(notebooks, "runs", profile="tiny")` runs copies in `runs/` with PROFILE and OUTPUT_DIR
injected. With `in_place=True` notebooks run with their own parameters and are replaced, without what
differs from machine to machine. Nothing here knows torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_kit.paths import make_output_dir, write_atomic

# Tiny models gain nothing from a second thread, and two busy processes with two threads each on
# two cores ran 70 times slower. A fixed hash seed keeps printed sets in one order.
KERNEL_ENV = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
METADATA = {  # of every committed notebook
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python",
                      "pygments_lexer": "ipython3"},
}  # fmt: skip
RUN_METADATA = ("papermill", "execution", "ExecuteTime")  # of a cell
WIDGET = "application/vnd.jupyter.widget-view+json"
# tqdm's "[00:34<00:10,  1.23it/s, reward=0.5]": the elapsed time, the rate, and what was added.
TQDM = re.compile(r" ?\[\d+(?::\d\d)+(?:<[^,\]]+(?:, *[^,\]]*/[^,\]]*)?|, *[^,\]]*/[^,\]]*)"
                  r"(?:, *([^\]]*))?\]")  # fmt: skip
ADDRESSES = re.compile(  # of the repository, in badges and install cells
    r"(?P<before>colab\.research\.google\.com/github/|git\+https://github\.com/)"
    r"(?P<repository>[\w.-]+/[\w.-]+?)(?=/blob/|\\\"|\"|\)|$)"
)


@dataclass
class Result:
    """What became of one notebook: status is "ok", "failed" or "not run"; time in seconds."""

    notebook: str
    status: str = "not run"
    seconds: float = 0.0
    error: str = ""


def find_notebooks(folder: str | Path, names: Sequence[str] = ()) -> list[Path]:
    """Notebooks in `folder` in reading order, or those named: `01_basic_grpo(.ipynb)` or `01`.

    Raises ValueError for an unknown or ambiguous name and for a folder without notebooks.
    """
    paths = sorted(Path(folder).glob("*.ipynb"))
    if not paths:
        raise ValueError(
            f"no notebooks in {folder}: go to the top of a checkout, or name it with --notebooks"
        )
    chosen = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        matches = [path for path in paths if stem in (path.stem, path.stem.split("_")[0])]
        if len(matches) != 1:
            problem = "several notebooks match" if matches else "there is no notebook"
            raise ValueError(f"{problem} {name!r}; there are: {', '.join(p.stem for p in paths)}")
        chosen += matches
    return list(dict.fromkeys(chosen)) or paths


def execute(
    notebooks: Sequence[str | Path],
    output_dir: str | Path,
    profile: str = "tiny",
    parameters: Mapping[str, Any] | None = None,
    in_place: bool = False,
    on_done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Execute `notebooks` one after the other; a failure does not stop the rest.

    The executed copy is `output_dir/<name>.ipynb`, also of a failed one, up to the failure; its own
    files go to `output_dir/<name>/`. `profile` and `parameters` are injected after the cell tagged
    `parameters`; not so `in_place`, where a notebook that succeeded is replaced by its executed,
    scrubbed self. After each, `output_dir/notebooks.json` is renewed and `on_done` gets its result.

    Raises ValueError or RuntimeError before anything runs, if any of this cannot work.
    """
    from grpo_kit.profiles import PROFILES

    if in_place and parameters:
        raise ValueError(
            f"{sorted(parameters)} cannot be injected in_place: edit the notebooks' parameters cells"
        )
    if not in_place and profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    if find_spec("papermill") is None:
        raise RuntimeError('papermill is not installed: pip install "grpo-kit[notebooks]"')
    import nbformat

    paths = [Path(path).resolve() for path in notebooks]
    results = {path.stem: Result(path.stem) for path in paths}
    if len(results) < len(paths):
        raise ValueError(f"two notebooks have the same name: {', '.join(map(str, paths))}")
    sources = [_read(path) for path in paths]
    output_dir = make_output_dir(output_dir).resolve()

    for number, (path, source) in enumerate(zip(paths, sources, strict=True), 1):
        result, progress = results[path.stem], f"[{number}/{len(paths)}] {path.stem}"
        print(f"{progress} ...", flush=True)
        injected = None
        if not in_place:
            folder = make_output_dir(output_dir / path.stem)
            if folder.is_relative_to(path.parents[1]):  # then the copy tells nothing of the machine
                folder = Path(os.path.relpath(folder, path.parent))
            injected = {"PROFILE": profile, "OUTPUT_DIR": folder.as_posix(), **(parameters or {})}
        start = time.perf_counter()
        try:
            executed = _run(source, path, output_dir / path.name, injected)
            if in_place:
                write_atomic(path, nbformat.writes(scrub(executed, path.parents[1])) + "\n")
        except Exception as error:  # a failed cell, a full disk: the next one gets its turn
            result.error = _one_line(error)
        result.seconds = round(time.perf_counter() - start, 1)
        result.status = "failed" if result.error else "ok"
        print(f"{progress} {result.status}, {result.seconds} s {result.error}".rstrip(), flush=True)
        report = {"profile": "in place" if in_place else profile,
                  "notebooks": [asdict(one) for one in results.values()]}  # fmt: skip
        write_atomic(output_dir / "notebooks.json", json.dumps(report, indent=1) + "\n")
        on_done(result)
    return list(results.values())


def _read(path: Path) -> Any:
    """The notebook as its author wrote it, without the cells that papermill adds."""
    import nbformat

    if not path.is_file():
        raise ValueError(f"there is no notebook {path}")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # a parser may raise nearly anything on a file that is not its own
        raise ValueError(f"{path} is not a notebook ({_one_line(error)})") from error
    added = {"injected-parameters", "papermill-error-cell-tag"}
    notebook.cells = [c for c in notebook.cells if not added & set(c.metadata.get("tags", []))]
    tagged = sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)
    if tagged != 1:
        raise ValueError(
            f"{path.name} has {tagged} cells tagged `parameters` and needs exactly one: "
            "without it PROFILE could not reach the notebook"
        )
    return notebook


def _run(source: Any, path: Path, output: Path, parameters: Mapping[str, Any] | None) -> Any:
    """Execute a notebook into `output`; when a cell fails, or on Ctrl-C, up to there."""
    import papermill

    # Written after each cell, so under another name: a killed run leaves the old copy whole.
    partial = output.with_name(f".{output.stem}.partial.ipynb")
    try:
        # The kernel inherits the environment; what the user has set there goes first.
        with mock.patch.dict(os.environ, {**KERNEL_ENV, **os.environ}):
            return papermill.execute_notebook(
                source,
                re.sub(r"([{}])", r"\1\1", str(partial)),  # papermill formats it as a template
                parameters=parameters,
                kernel_name="python3",
                language="python",
                cwd=path.parent,
                # Quiet: each kernel warns that it speaks TCP, on the loopback interface only.
                extra_arguments=["--log-level=ERROR"],
                # A bar on a terminal; in a log the two lines around the run are enough.
                progress_bar={"desc": path.stem, "disable": None, "leave": False},
            )
    finally:
        if partial.exists():
            os.replace(partial, output)


def _one_line(error: Exception, width: int = 200) -> str:
    """What went wrong, and in which cell, without colours."""
    name, text = type(error).__name__, str(error)
    if hasattr(error, "exec_count"):  # papermill's error, which holds that of the cell
        name, text = f"cell [{error.exec_count}] {error.ename}", error.evalue
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).strip()
    return ": ".join([name, *text.splitlines()[:1]])[:width]


# --- what is committed must not tell one machine or one minute from another -----------------------


def scrub(executed: Any, checkout: Path) -> Any:
    """Remove what holds anything of the machine or the clock; changes `executed` and returns it.

    That is: metadata of runs and widgets, widget views, kernel versions, absolute paths in outputs
    (they become relative to `checkout`, or `~`, `{env}`, `{tmp}`), addresses of objects, and of
    progress bars the redrawn frames and the times.
    """
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    replacements = _replacements(checkout)

    def clean(text: str) -> str:
        for pattern, replacement in replacements:
            text = re.sub(pattern, replacement, text)
        return text

    executed.metadata = type(executed)(METADATA)
    for cell in executed.cells:
        kept = {k: v for k, v in cell.metadata.items() if v and k not in RUN_METADATA}
        cell.metadata = type(executed)(kept)
        if cell.cell_type != "code":
            continue
        cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
        # How a stream is cut into messages is chance; of a redrawn line the last frame counts.
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = clean(_without_times(output.text))
            elif output.output_type == "error":
                output.evalue = clean(output.evalue)
                output.traceback = [clean(line) for line in output.traceback]
            else:
                texts = [k for k in output.data if k.startswith("text/") or "svg" in k]
                output.data.update({kind: clean(output.data[kind]) for kind in texts})
        cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return executed


def _without_times(stream: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-ln-z]", "", stream)  # cursor moves; colours (m) stay
    text = TQDM.sub(lambda match: f" [{match[1]}]" if match[1] else "", text)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _replacements(checkout: Path) -> list[tuple[str, str]]:
    """Patterns of what tells a machine, and what stands in their place."""
    folders = {Path.home(): "~", Path(tempfile.gettempdir()): "{tmp}", Path(sys.prefix): "{env}"}
    places = {
        str(variant): name
        for folder, name in (folders | {checkout: "."}).items()
        for variant in (folder.absolute(), folder.resolve())
        if len(variant.parts) > 1  # never the root of the file system
    }
    # Python's own names for the cell being executed come first: they are inside {tmp}.
    pairs = [(r"[^\s\"'(]*[/\\]ipykernel_\d+[/\\]\d+\.py", "{cell}")]
    # Longest path first, so that a checkout inside the home folder is not cut at the home.
    for place in sorted(places, key=len, reverse=True):
        path = rf"(?<![\w.~-]){re.escape(place)}"
        if places[place] == ".":  # "/home/me/kit/runs/a.png" reads "runs/a.png"
            pairs.append((rf"{path}[/\\](?=\w)", ""))
        pairs.append((rf"{path}(?![\w-])", places[place]))
    return [*pairs, (r"\b0x[0-9a-fA-F]{8,16}\b", "0x…")]


# --- where notebooks are published ----------------------------------------------------------------


def repository_of(folder: str | Path) -> str:
    """`owner/name` of the repository that a checkout's `pyproject.toml` names; else ValueError."""
    path = Path(folder) / "pyproject.toml"
    pattern = r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?"'
    match = re.search(pattern, path.read_text(), re.M)
    if match is None:
        raise ValueError(
            f"{path} names no repository: under [project.urls] write "
            'Repository = "https://github.com/OWNER/NAME"'
        )
    return match[1]


def set_repository(notebooks: Sequence[str | Path], repository: str) -> list[str]:
    """Let badges and install cells lead to `owner/name`; returns the notebooks that changed."""
    changed = []
    for path in map(Path, notebooks):
        text = path.read_text(encoding="utf-8")
        new = ADDRESSES.sub(rf"\g<before>{repository}", text)
        if new != text:
            write_atomic(path, new)
            changed.append(path.stem)
    return changed
