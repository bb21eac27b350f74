"""A reader's own Python files: rewards as FILE.py:NAME, and the arms that `compare` reads."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import cloudpickle

from grpo_kit import rewards


def load_function(text: str) -> Callable:
    """The function FILE.py:NAME, or a reward of the kit by its name, with or without `_reward`.

    Raises ValueError where there is none.
    """
    file, colon, name = text.rpartition(":")
    if not colon and not text.endswith(".py"):
        return _shipped(text)
    if not file or not name:
        raise ValueError(f"{text!r} names no function: write FILE.py:NAME, such as my.py:short.")
    module = load_module(file)
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = [key for key, value in vars(module).items() if _own(value, module)]
    has = f"it defines {', '.join(functions) or 'none'}"
    problem = "is no function" if hasattr(module, name) else "is not defined there"
    raise ValueError(f"{name!r} of {file} {problem}: choose a function of the file ({has}).")


def _shipped(name: str) -> Callable:
    functions = dict(inspect.getmembers(rewards, inspect.isfunction))
    arguments = {key: inspect.signature(one).parameters for key, one in functions.items()}
    known = [key for key in functions if "completions" in arguments[key]]
    for own in (name, f"{name}_reward"):
        if own in known:
            return functions[own]
    remedy = f"choose one of {', '.join(known)}, or give FILE.py:NAME"
    raise ValueError(f"the kit has no reward {name!r}: {remedy}.")


def _own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def load_arms(file: str | Path) -> tuple[dict[str, dict], ModuleType]:
    """The variable `arms` of a file, and the file as a module; ValueError where it has none."""
    module = load_module(file)
    arms = getattr(module, "arms", None)
    if not isinstance(arms, dict):
        found = f"`arms` of {file} is a {type(arms).__name__}" if arms else f"{file} has no `arms`"
        example = 'arms = {"plain": {}, "mine": {"rewards": [accuracy_reward, short]}}'
        raise ValueError(f"{found}: give a dict with an entry an arm, such as {example}.")
    return arms, module


def load_module(file: str | Path) -> ModuleType:
    """A Python file as a module, imported once; cloudpickle carries it to other processes.

    Its folder can be imported from. Raises ValueError where the file cannot be imported.
    """
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        problem = (
            "its name does not end in .py" if path.suffix != ".py" else "there is no such file"
        )
        raise ValueError(f"{file} is no Python file ({problem}): give the path of one.")
    name = path.stem
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if module else PathFinder.find_spec(name)
    if (module or spec) and (not spec or Path(spec.origin or "").resolve() != path):
        problem = f"{file} has the name of another module, {name!r}"
        raise ValueError(f"{problem}: give the file another name.")
    if module:
        return module
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        sys.path.remove(str(path.parent))
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines or ["?"])[-1]
        problem = f"line {line} of {file} raises {type(error).__name__}: {error}"
        raise ValueError(f"{problem.rstrip('.')}. Correct it, then try again.") from error
    cloudpickle.register_pickle_by_value(module)
    return module
