"""Run the course's notebooks without a browser, and report how it went.

Two uses, one path:

- `execute(notebooks, "runs", profile="tiny")` runs each notebook by papermill into `runs/` with
  PROFILE and OUTPUT_DIR injected, goes on after a failure, and leaves `runs/notebooks.md`
  and `runs/notebooks.json`.
- `execute(notebooks, "runs", in_place=True)` runs each with its own default parameters, so that
  nothing is injected, scrubs what differs from machine to machine and replaces the notebook.

A notebook is executed in its own folder, as JupyterLab does it. Nothing here knows torch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_kit.paths import make_output_dir, write_atomic

KERNEL = "python3"
# Tiny models gain nothing from a second thread, and two busy processes with two threads each on
# two cores ran 70 times slower. A fixed hash seed keeps printed sets in one order.
KERNEL_ENV = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Result:
    """What became of one notebook: status is "ok", "failed" or "not run"; time in seconds."""

    notebook: str
    status: str = "not run"
    seconds: float = 0.0
    error: str = ""


def find_notebooks(folder: str | Path, names: Sequence[str] = ()) -> list[Path]:
    """Notebooks in `folder` in reading order, or those named.

    A name is a file name with or without `.ipynb`, or its leading number (`01`).
    Raises ValueError for an unknown or ambiguous name and for a folder without notebooks.
    """
    folder = Path(folder)
    found = sorted(folder.glob("*.ipynb"))
    if not found:
        raise ValueError(
            f"there are no notebooks in {folder}: run this from the top of a checkout, or name "
            "the folder with --notebooks"
        )
    chosen = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        hits = [path for path in found if path.stem == stem]
        hits = hits or [path for path in found if path.stem.split("_")[0] == stem]
        if len(hits) != 1:
            known = ", ".join(path.stem for path in found)
            problem = "several notebooks match" if hits else "there is no notebook"
            raise ValueError(f"{problem} {name!r} in {folder}; there are: {known}")
        if hits[0] not in chosen:
            chosen.append(hits[0])
    return chosen or found


def execute(
    notebooks: Sequence[str | Path],
    output_dir: str | Path,
    profile: str = "tiny",
    parameters: Mapping[str, Any] | None = None,
    in_place: bool = False,
) -> list[Result]:
    """Execute `notebooks` one after the other into `output_dir`; a failure does not stop the rest.

    The executed copy is `output_dir/<name>.ipynb` (also of a failed one, up to the failure) and
    the notebook's own files go to `output_dir/<name>/`. `profile` and the further `parameters`
    are injected after the cell tagged `parameters`. With `in_place` nothing is injected, and a
    notebook that succeeded is replaced by its executed, scrubbed self; one that failed stays.

    The report in `output_dir` is written after each notebook, so a killed run leaves a true one.
    Raises ValueError or RuntimeError before anything runs: unknown profile, papermill not
    installed, missing or malformed notebook, no cell tagged `parameters`, two notebooks of one
    name, unwritable output folder.
    """
    if in_place and parameters:
        raise ValueError(
            f"parameters {sorted(parameters)} were given together with in_place: a notebook in "
            "place runs with its own defaults, edit its parameters cell instead"
        )
    if not in_place:
        _check_profile(profile)
    nbformat, _ = _import_notebook_packages()
    paths = [Path(path).resolve() for path in notebooks]
    stems = [path.stem for path in paths]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise ValueError(f"two notebooks are called {twice[0]!r}: their results would collide")
    sources = [_read_notebook(path) for path in paths]
    output_dir = make_output_dir(output_dir).resolve()

    results = [Result(stem) for stem in stems]
    for number, (path, source, result) in enumerate(zip(paths, sources, results, strict=True), 1):
        print(f"[{number}/{len(paths)}] {result.notebook} ...", flush=True)
        injected = {}
        if not in_place:
            own_dir = make_output_dir(output_dir / path.stem)
            injected = {
                "PROFILE": profile,
                "OUTPUT_DIR": _portable(own_dir, path),
                **(parameters or {}),
            }
        start = time.perf_counter()
        executed, result.error = _run_one(path, source, output_dir / path.name, injected)
        result.seconds = round(time.perf_counter() - start, 1)
        if in_place and not result.error:
            try:
                scrubbed = scrub(executed, source, _checkout_of(path))
                write_atomic(path, nbformat.writes(scrubbed).rstrip("\n") + "\n")
            except OSError as error:
                result.error = f"cannot write {path.name} in its place ({error.strerror})"
        result.status = "failed" if result.error else "ok"
        line = f"[{number}/{len(paths)}] {result.notebook} {result.status}, {result.seconds:.1f} s"
        print(f"{line}: {result.error}" if result.error else line, flush=True)
        _write_report(results, output_dir, "in place" if in_place else profile)
    _show(results, output_dir)
    return results


# ---------------------------------------------------------------------------------------------
# before the run


def _import_notebook_packages() -> tuple[Any, Any]:
    """nbformat and papermill: seconds to import on a busy machine, so not before they are used."""
    try:
        import nbformat
        import papermill
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"running notebooks needs the package {error.name}, which is not installed: "
            'pip install "grpo-kit[notebooks]"'
        ) from error
    return nbformat, papermill


def _check_profile(profile: str) -> None:
    from grpo_kit.profiles import PROFILES

    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")


def _tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def _read_notebook(path: Path) -> Any:
    """The notebook as its author wrote it: without injected cells, every cell with a stable id."""
    if not path.is_file():
        raise ValueError(f"there is no notebook {path}")
    nbformat, _ = _import_notebook_packages()
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except Exception as error:  # a parser may raise nearly anything on a file that is not its own
        raise ValueError(f"{path} is not a notebook ({_one_line(error)})") from error
    ours = ("injected-parameters", "papermill-error-cell-tag")
    notebook.cells = [c for c in notebook.cells if not set(ours) & set(_tags(c))]
    tagged = sum("parameters" in _tags(cell) for cell in notebook.cells)
    if tagged != 1:
        raise ValueError(
            f"{path.name} has {tagged} cells tagged `parameters` and needs exactly one: "
            "without it PROFILE could not reach the notebook"
        )
    # nbformat invents random ids for files older than 4.5; a position is a stable one.
    for index, cell in enumerate(notebook.cells):
        cell.setdefault("id", f"cell-{index:03d}")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _checkout_of(notebook: Path) -> Path:
    """The folder that paths in outputs are made relative to: the notebook's project."""
    for folder in notebook.parents:
        if (folder / "pyproject.toml").is_file() or (folder / ".git").exists():
            return folder
    return notebook.parent


def _portable(folder: Path, notebook: Path) -> str:
    """`folder` relative to the notebook's folder inside one project, else absolute."""
    if folder.is_relative_to(_checkout_of(notebook)):
        return Path(os.path.relpath(folder, notebook.parent)).as_posix()
    return str(folder)


# ---------------------------------------------------------------------------------------------
# where they are published

ADDRESSES = re.compile(
    r"(?P<before>colab\.research\.google\.com/github/|git\+https://github\.com/)"
    r"(?P<repository>[\w.-]+/[\w.-]+?)(?=/blob/|\\\"|\"|\)|$)"
)


def repository_of(folder: str | Path) -> str:
    """`owner/name` of the repository that the `pyproject.toml` of a checkout names.

    Raises ValueError where it names none on GitHub.
    """
    path = Path(folder) / "pyproject.toml"
    told = re.search(
        r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?"',
        path.read_text(),
        re.M,
    )
    if told is None:
        raise ValueError(
            f"{path} names no repository: under [project.urls] write "
            'Repository = "https://github.com/OWNER/NAME"'
        )
    return told[1]


def set_repository(notebooks: Sequence[str | Path], repository: str) -> list[str]:
    """Let badges and install cells lead to `owner/name`; the notebooks that were changed."""
    changed = []
    for path in map(Path, notebooks):
        text = path.read_text(encoding="utf-8")
        new = ADDRESSES.sub(rf"\g<before>{repository}", text)
        if new != text:
            write_atomic(path, new)
            changed.append(path.stem)
    return changed


# ---------------------------------------------------------------------------------------------
# the run


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set those variables that the user has not set; the kernel inherits them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _run_one(path: Path, source: Any, output: Path, parameters: dict) -> tuple[Any, str]:
    """Execute into `output`; return the executed notebook (None if it failed) and its error."""
    _, papermill = _import_notebook_packages()
    # papermill formats paths as templates, and wants the extension.
    partial = output.with_name(f".{output.stem}.partial.ipynb")
    template = str(partial).replace("{", "{{").replace("}", "}}")
    executed, error_line = None, ""
    try:
        with _environment(KERNEL_ENV):
            executed = papermill.execute_notebook(
                copy.deepcopy(source),
                template,
                parameters=parameters,
                kernel_name=KERNEL,
                language="python",
                cwd=path.parent,
                # Quiet: each kernel warns that it speaks TCP, on the loopback interface only.
                extra_arguments=["--log-level=ERROR"],
                # A bar on a terminal; in a log the two lines around the run are enough.
                progress_bar={"desc": path.stem, "disable": None, "leave": False},
            )
    except papermill.PapermillExecutionError as error:
        error_line = f"cell [{error.exec_count}] {_one_line(f'{error.ename}: {error.evalue}')}"
    except Exception as error:  # a dead kernel, a full disk: reported, and the next one gets a turn
        error_line = _one_line(f"{type(error).__name__}: {error}")
    finally:
        # Also when interrupted: what has been executed so far can be read.
        if partial.exists():
            os.replace(partial, output)
    return executed, error_line


def _one_line(error: object, width: int = 200) -> str:
    """The first line that says something, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip()
    line = text.splitlines()[0].strip() if text else type(error).__name__
    return line if len(line) <= width else line[: width - 1] + "…"


# ---------------------------------------------------------------------------------------------
# the report


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("grpo-kit", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _write_report(results: Sequence[Result], output_dir: Path, profile: str) -> None:
    """`notebooks.json` for machines, `notebooks.md` for people, each whole or not at all."""
    versions = _versions()
    content = {
        "profile": profile,
        "versions": versions,
        "seconds": round(sum(result.seconds for result in results), 1),
        "notebooks": [asdict(result) for result in results],
    }
    passed = sum(result.status == "ok" for result in results)
    lines = [
        "# Notebooks",
        "",
        f"{passed} of {len(results)} succeeded in {content['seconds']:.0f} s · profile {profile} · "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "| notebook | status | seconds | error |",
        "|---|---|---:|---|",
    ]
    for result in results:
        error = result.error.replace("|", "\\|")
        lines.append(f"| {result.notebook} | {result.status} | {result.seconds:.1f} | {error} |")
    write_atomic(output_dir / "notebooks.json", json.dumps(content, indent=2) + "\n")
    write_atomic(output_dir / "notebooks.md", "\n".join(lines) + "\n")


def _show(results: Sequence[Result], output_dir: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("notebook", "status")
    table.add_column("seconds", justify="right")
    table.add_column("error")
    for result in results:
        status = Text(result.status, style="green" if result.status == "ok" else "red")
        table.add_row(result.notebook, status, f"{result.seconds:.1f}", Text(result.error))
    Console().print(table)
    print(f"in short: {output_dir / 'notebooks.md'}", flush=True)


# ---------------------------------------------------------------------------------------------
# what is committed must not tell one machine or one minute from another


def scrub(executed: Any, source: Any, checkout: Path) -> Any:
    """A copy of `executed` that holds nothing of the machine and nothing of the clock.

    Removed: papermill's and nbclient's metadata, widget state and widget views, kernel versions,
    absolute paths in outputs (relative to `checkout`, or `~`, `{env}`, `{tmp}`), addresses of
    objects, the redrawn frames and rates of progress bars. Cell ids come from `source`.
    """
    notebook = copy.deepcopy(executed)
    for name in ("papermill", "widgets", "signature"):
        notebook.metadata.pop(name, None)
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": KERNEL,
    }
    notebook.metadata["language_info"] = {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    }
    replacements = _path_replacements(checkout)
    for cell, original in zip(notebook.cells, source.cells, strict=True):
        cell["id"] = original["id"]
        for name in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(name, None)
        if not _tags(cell):
            cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            cell.outputs = _scrub_outputs(cell.outputs, replacements)
    return notebook


def _path_replacements(checkout: Path) -> list[tuple[re.Pattern, str]]:
    """Longest path first, so that a checkout inside the home folder is not cut at the home."""
    places = {}
    for folder, name in (
        (Path.home(), "~"),
        (Path(tempfile.gettempdir()), "{tmp}"),
        (Path(sys.prefix), "{env}"),
        (checkout, "."),
    ):
        for variant in (folder.absolute(), folder.resolve()):
            if len(variant.parts) > 1:  # never the root of the file system
                places[str(variant)] = name
    # Python's own names for the cell being executed come first: they are inside {tmp}.
    patterns = [(re.compile(r"[^\s\"'(]*[/\\]ipykernel_\d+[/\\]\d+\.py"), "{cell}")]
    for place in sorted(places, key=len, reverse=True):
        edge_before, edge_after = r"(?<![\w.~-])", r"(?![\w-])"
        if places[place] == ".":  # "/home/me/kit/runs/a.png" reads "runs/a.png"
            patterns.append((re.compile(edge_before + re.escape(place) + r"[/\\](?=\w)"), ""))
        patterns.append((re.compile(edge_before + re.escape(place) + edge_after), places[place]))
    patterns.append((re.compile(r"\b0x[0-9a-fA-F]{8,16}\b"), "0x…"))
    return patterns


def _scrub_outputs(outputs: Sequence[Any], replacements: Sequence[tuple]) -> list:
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            # How a stream is cut into messages is chance: one output a run of the same stream.
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        elif WIDGET not in output.get("data", {}):
            kept.append(output)
    for output in kept:
        output.get("metadata", {}).pop("widgets", None)
        if output.output_type == "stream":
            output.text = _replace(_terminal_text(output.text), replacements)
        elif output.output_type == "error":
            output.evalue = _replace(output.evalue, replacements)
            output.traceback = [_replace(line, replacements) for line in output.traceback]
        else:
            for kind, content in output.data.items():
                if isinstance(content, str) and (kind.startswith("text/") or "svg" in kind):
                    output.data[kind] = _replace(content, replacements)
    return [output for output in kept if output.output_type != "stream" or output.text]


def _replace(text: str, replacements: Sequence[tuple]) -> str:
    for pattern, replacement in replacements:
        text = pattern.sub(replacement, text)
    return text


# tqdm's "[00:34<00:10,  1.23it/s, reward=0.5]": the elapsed time, the rate, and what was added.
_TQDM = re.compile(r" ?\[\d+(?::\d\d)+(?:<[^,\]]+(?:, *[^,\]]*/[^,\]]*)?|, *[^,\]]*/[^,\]]*)"
                   r"(?:, *([^\]]*))?\]")  # fmt: skip


def _terminal_text(text: str) -> str:
    """What a terminal would show in the end: redrawn lines once, and no times of progress bars."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-ln-z]", "", text)  # cursor moves; colours (m) stay
    lines = []
    for line in text.split("\n"):
        frames = [frame for frame in line.split("\r") if frame.strip()]
        last = frames[-1] if frames else ""
        lines.append(_TQDM.sub(lambda hit: f" [{hit[1]}]" if hit[1] else "", last).rstrip())
    return "\n".join(lines)
