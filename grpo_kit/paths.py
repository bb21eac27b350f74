"""Where the kit's files are, and how a file is written so that a reader never sees half of it.

Nothing here knows torch: the command line imports this module before anything heavy.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir() -> Path:
    """Folder with the shipped inputs (tiny base model, problems, claims, reported results).

    A wheel carries it inside the package; a checkout (also one installed with `pip install -e`)
    has it at its top. The packaged folder is asked first: it exists in wheels only, whereas some
    unrelated `data/` may stand beside an installed package.

    Raises FileNotFoundError when neither is there.
    """
    packaged = _PACKAGE / "_data"
    if packaged.is_dir():
        return packaged
    checkout = _PACKAGE.parent
    if (checkout / "data").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "data"
    raise FileNotFoundError(
        f"the data folder of grpo-kit is neither at {packaged} nor at {checkout / 'data'}: "
        "the installation is incomplete, install the package again"
    )


def results_dir() -> Path:
    """Folder of the reported results, one file a run: `results/` of `data_dir()`."""
    return data_dir() / "results"


def make_output_dir(path: str | Path) -> Path:
    """Create the folder `path` if needed and prove that files can be written there.

    To be called before any compute: a run that cannot store its result should not start.

    Raises RuntimeError, naming the folder and the system's reason, when it cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RuntimeError(
            f"cannot write to the output folder {folder} ({error.strerror or error}): "
            "choose another folder or change its permissions"
        ) from error
    return folder


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all.

    The content goes to a temporary name in the same folder and is renamed, so a killed process or
    a full disk leaves the old file as it was. Raises OSError when it cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
