"""Where the kit's files are, and how a file is written whole or not at all.

Nothing here knows torch: the command line imports this module before anything heavy.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir() -> Path:
    """Folder of the shipped inputs: tiny base, problems, claims, reported results.

    A wheel carries it inside the package, a checkout at its top. The packaged one comes first: an
    unrelated `data/` may stand beside an installed package. FileNotFoundError where there is none.
    """
    packaged, checkout = _PACKAGE / "_data", _PACKAGE.parent
    if packaged.is_dir():
        return packaged
    if (checkout / "data").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "data"
    places = f"neither at {packaged} nor at {checkout / 'data'}"
    raise FileNotFoundError(f"grpo-kit's data is {places}: install the package again")


def results_dir() -> Path:
    """Folder of the reported results, one file a run: `results/` of `data_dir()`."""
    return data_dir() / "results"


def make_output_dir(path: str | Path) -> Path:
    """Create the folder `path` and prove that files can be written there, before any compute.

    Raises RuntimeError, naming the folder and the system's reason, when it cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"cannot write to the output folder {folder} ({error.strerror or error})"
        raise RuntimeError(f"{problem}: choose another or change its permissions") from error
    return folder


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to a temporary name beside `path`, then rename it.

    A killed process or a full disk leaves the old file as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
