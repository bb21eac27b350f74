"""A reader's own Python files: rewards as FILE.py:NAME, and the arms that `compare` reads."""

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_kit import rewards


def load_function(text: str) -> Callable:
    """The function FILE.py:NAME, or a reward of the kit by its name, with or without `_reward`.

    Raises ValueError where there is none.
    """
    file, colon, name = text.rpartition(":")
    if colon:
        found = load_file(file).get(name)
        if callable(found):
            return found
        raise ValueError(f"{file} defines no function {name!r}: give FILE.py:NAME.")
    known = {
        name: function
        for name, function in inspect.getmembers(rewards, inspect.isfunction)
        if "completions" in inspect.signature(function).parameters
    }
    for name in (text, f"{text}_reward"):
        if name in known:
            return known[name]
    remedy = f"choose one of {', '.join(known)}, or give FILE.py:NAME"
    raise ValueError(f"the kit has no reward {text!r}: {remedy}.")


def load_arms(file: str | Path) -> Mapping[str, Mapping]:
    """What a file defines as `arms`; ValueError where it defines none."""
    names = load_file(str(file))
    if "arms" not in names:
        example = 'arms = {"plain": {}, "mine": {"rewards": [accuracy_reward, short]}}'
        raise ValueError(f"{file} has no `arms`: add a dict such as {example}.")
    return names["arms"]


def load_file(file: str) -> dict[str, Any]:
    """All names that a Python file defines; it may import files beside it.

    It is run under another name than its own: what it defines is sent to other processes whole.
    """
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"there is no Python file {file!r}: give the path of one, as FILE.py.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        return runpy.run_path(str(path), run_name=f"idea_{path.stem}")
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines or ["?"])[-1]
        raise ValueError(f"line {line} of {file} raises {type(error).__name__}: {error}") from error
