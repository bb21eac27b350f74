"""Where the kit's files are, and how a file is written whole or not at all.

Nothing here knows torch: the command line imports this module before anything heavy.
"""

import os
import tempfile
from pathlib import Path


def data_dir() -> Path:
    """Folder of the shipped inputs: tiny base, problems, claims, reported results.

    A wheel carries it inside the package, where an unrelated `data/` may stand beside it; a
    checkout has it at its top.
    """
    package = Path(__file__).resolve().parent
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent / "data"


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
