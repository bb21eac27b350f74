"""Is it still the same function? A hash that changes with what a reader's function does."""

import copyreg
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch.nn import Module

from grpo_kit.lab.records import fingerprint
from grpo_kit.models import Policy, weights_hash
from grpo_kit.rewards.scoring import INSTALLED, reward_name

PLAIN = (str, int, float, bool, bytes, type(None))
# What the kit's objects remember or count, as do attributes whose names begin with an underscore
REMEMBERED = ("cache", "cache_dir")


def identity_of(function: Callable) -> str:
    """A function's name and a hash of its code, its settings, and what both refer to.

    Comments and line numbers do not count. Functions and classes of installed packages, this one
    among them, count by their names, objects of theirs by their plain settings too, those of this
    one by all their settings. Models count by their weights. What an object remembers of its use
    does not count.
    """
    return f"{reward_name(function)} {fingerprint(_described(function, {}))[:12]}"


def _described(value: Any, seen: dict[int, Any]) -> Any:
    """`value` as something that JSON takes; each object is described once.

    `seen` holds the objects by their ids: one that is gone would leave its id to another.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) in seen:
        return "again"
    seen[id(value)] = value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_described(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):  # their order differs from process to process
        return sorted(str(_described(item, seen)) for item in value)
    if isinstance(value, dict):
        return {str(key): _described(item, seen) for key, item in value.items()}
    if hasattr(value, "tolist") and not isinstance(value, type):  # an array or a tensor
        return [type(value).__name__, fingerprint(value.tolist())]
    if isinstance(value, partial):
        return _described([value.func, value.args, value.keywords], seen)
    if isinstance(value, MethodType):
        return _described([value.__func__, value.__self__], seen)
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, _described(value.co_consts, seen)]
    if isinstance(value, FunctionType) and _is_own(value):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        names = sorted(_names(value.__code__))  # of what it imports itself, too
        used = {name: value.__globals__.get(name, sys.modules.get(name)) for name in names}
        defaults = value.__defaults__, value.__kwdefaults__
        return _described([value.__code__, defaults, cells, used], seen)
    if isinstance(value, (property, cached_property)):
        return _described([getattr(value, name, None) for name in ("fget", "fset", "func")], seen)
    if hasattr(value, "__wrapped__") and not isinstance(value, type):  # by functools.cache, say
        return _described(value.__wrapped__, seen)
    if isinstance(value, type) and _is_own(value):
        members = {name: getattr(m, "__func__", m) for name, m in vars(value).items()}
        own = {k: m for k, m in members.items() if k[:2] != "__" or isinstance(m, FunctionType)}
        return _described([own, value.__bases__], seen)
    if isinstance(value, ModuleType) and _is_own(value):
        inner = [m for m in vars(value).values() if isinstance(m, ModuleType) and _is_own(m)]
        return [Path(value.__file__).read_text(encoding="utf-8"), _described(inner, seen)]
    named = isinstance(value, ModuleType) or hasattr(value, "__qualname__")
    kind = value if named else type(value)
    name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind.__name__)}"
    if kind is value:
        return name
    if isinstance(value, Policy):
        return [name, weights_hash(value.model.parameters(), samples=256), value.bf16]
    return [name, _described(kind, seen), _described(_settings(value, kind), seen)]


def _settings(value: Any, kind: type) -> dict[str, Any]:
    """What decides what an object does, and does not change while it is used."""
    settings = dict(getattr(value, "__dict__", {}))
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    settings |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if isinstance(value, SimpleNamespace):
        return settings
    if not hasattr(value, "__dict__") and not _is_own(kind):  # a pattern, a range, a deque
        with suppress(Exception):  # a lock, a file
            reduce = copyreg.dispatch_table.get(kind)
            made = reduce(value) if reduce else value.__reduce_ex__(4)
            return {"made of": [*made[1:3], *map(list, filter(None, made[3:5]))]}
    if isinstance(value, Module):
        settings.pop("training", None)  # using it may set it; a scripted module has none
        # rounded: an embedder's are loaded in whichever type is faster
        rounded = (parameter.bfloat16() for parameter in value.parameters())
        settings["weights"] = weights_hash(rounded, samples=256)
    if _is_own(kind):
        return settings
    if kind.__module__.partition(".")[0] == "grpo_kit":
        return {k: v for k, v in settings.items() if k[0] != "_" and k not in REMEMBERED}
    return {key: item for key, item in settings.items() if isinstance(item, PLAIN)}


def _names(code: CodeType) -> set[str]:
    """The global names and attributes that a function and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_own(value: Any) -> bool:
    """Whether a function, class or module is the reader's, not of a package."""
    name = getattr(value, "__module__", None) or value.__name__
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # of a notebook or a file that was run, or built in
        return isinstance(value, (FunctionType, type)) and name not in sys.builtin_module_names
    return name.partition(".")[0] != "grpo_kit" and not file.startswith(INSTALLED)
