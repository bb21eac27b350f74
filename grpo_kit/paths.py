"""Where the kit's files are, and how a file is written whole or not at all.

Nothing here knows torch: the command line imports this module before anything heavy.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout
from platformdirs import user_cache_path


def data_dir() -> Path:
    """Folder of the shipped inputs: tiny base, problems, claims, reported results.

    A wheel carries it inside the package, a checkout at its top.
    """
    package = Path(__file__).resolve().parent
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent / "data"


def results_dir() -> Path:
    """Folder of the reported results, one file a run: `results/` of `data_dir()`."""
    return data_dir() / "results"


def cache_dir() -> Path:
    """Folder of converted models and of bases for lessons: GRPO_KIT_CACHE, or the user's cache."""
    folder = os.environ.get("GRPO_KIT_CACHE")
    return Path(folder).expanduser() if folder else user_cache_path("grpo-kit", appauthor=False)


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


@contextmanager
def writing(folder: str | Path, what: str = "run") -> Iterator[Path]:
    """Hold a folder as the one that writes `what` there; it is made where there is none.

    Raises RuntimeError where another process that lives holds it.
    """
    folder = make_output_dir(folder)
    lock = FileLock(folder / f".{what}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        wait = "wait until it has ended, or choose another folder"
        raise RuntimeError(f"another process writes a {what} to {folder}: {wait}.") from None
    try:
        yield folder
    finally:
        lock.release()


def sha256_of(file: str | Path) -> str:
    """The hex digest of a file's content."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to under a temporary name beside `path`, which it gets at the end.

    A killed process or a full disk leaves the old file as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) whole or not at all, see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
