"""Call rewards under TRL's protocol, and refuse what they may not return.

A reward is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, or a
coroutine function. It may take `trainer_state` and `log_metric(name, value)`, as in TRL. Whatever
is wrong with one ends in a sentence that names it.
"""

import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal
from torch import Tensor

INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
PROTOCOL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")


def reward_name(reward: Callable) -> str:
    """The reward's `__name__`, a partial's function's, else its class's."""
    reward = reward.func if isinstance(reward, partial) else reward
    return getattr(reward, "__name__", type(reward).__name__)


def reward_names(rewards: Sequence[Callable]) -> list[str]:
    """Of the metrics `rewards/<name>/mean`: a second one called `brief` is `brief_2`."""
    names = list(map(reward_name, rewards))
    earlier = (names[:i].count(name) for i, name in enumerate(names))
    return [f"{name}_{n + 1}" if n else name for name, n in zip(names, earlier, strict=True)]


def is_coroutine(reward: Callable) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


class RewardError(RuntimeError):
    """A reward raised an error; the message has its name and the error's class and text."""


def place_of(error: BaseException) -> str:
    """The file and line where an error was raised, of a reader's code rather than a package's."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([f for f in frames if not f.filename.startswith(INSTALLED)] or frames)[-1]
    return f"({Path(last.filename).name}, line {last.lineno})"


class naming:  # a class, since a generator would turn a StopIteration into an error of its own
    """Turn an error that a reader's `function` raises inside into `error`, which names it."""

    def __init__(self, kind: str, function: Callable, error: type[Exception], remedy: str) -> None:
        self.name, self.error, self.remedy = f"the {kind} {reward_name(function)}", error, remedy

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception):
            return
        problem = f"{self.name} raised {kind.__name__}: {error}".rstrip(".: ")
        raise self.error(f"{problem} {place_of(error)}. {self.remedy}") from error


def check_rewards(rewards: Sequence[Callable]) -> None:
    """Raise TypeError unless `rewards` is a list of functions, ValueError for an empty list."""
    example = "give a list of functions, such as rewards=[accuracy_reward, format_reward]"
    if not isinstance(rewards, (list, tuple)):
        kind = "one function" if callable(rewards) else f"a {type(rewards).__name__}"
        raise TypeError(f"`rewards` is {kind}, not a list: {example}.")
    if not rewards:
        raise ValueError(f"there are no rewards: {example}.")
    for i, reward in enumerate(rewards):
        if inspect.isclass(reward):
            problem = f"rewards[{i}] is the class {reward.__name__}"
            raise TypeError(f"{problem}: give an object of it, {reward.__name__}(...).")
        if not callable(reward):
            problem = f"rewards[{i}] is {reward!r:.80}, not a function"
            raise TypeError(f"{problem}: import the function and give it itself, without quotes.")


def check_columns(reward: Callable, columns: Sequence[str], source: str) -> None:
    """Raise ValueError where the reward needs a column that `source`, named in words, lacks.

    Raises TypeError where the reward has no `**columns`: it is passed every column there is.
    """
    parameters = inspect.signature(reward).parameters
    for name, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        required = parameter.default is parameter.empty and not variadic
        if required and name not in (*PROTOCOL, *columns):
            problem = f"the reward {reward_name(reward)} needs a column {name!r}"
            raise ValueError(f"{problem}, which {source} lacks; it has {', '.join(columns)}.")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        passed = ", ".join(name for name in (*PROTOCOL, *columns) if name not in parameters)
        problem = f"the reward {reward_name(reward)} lacks the argument **columns"
        remedy = f"write def {reward_name(reward)}({', '.join((*parameters, '**columns'))})"
        raise TypeError(f"{problem}, but it is passed {passed or 'more'}, too: {remedy}.")


def score_texts(
    texts: Sequence[str], completion_ids: Sequence, examples: Sequence[dict],
    rewards: Sequence[Callable], state: Any = None, logged: dict[str, list[float]] | None = None,
) -> Tensor:  # fmt: skip
    """Rewards of N texts, one a row of `examples`: (N, R) float32, NaN for None.

    Coroutine rewards run at the same time as each other and beside the other rewards. `logged`
    collects what rewards pass to `log_metric`. Raises as `finite_values`, and RewardError where a
    reward raises.
    """
    logged = {} if logged is None else logged
    remedy = "Correct it; for a completion that it cannot score, a reward returns None."

    def arguments() -> dict:  # each reward's own: one that changes them leaves the others' alone
        columns = {name: [example[name] for example in examples] for name in examples[0]}
        return {
            "completions": [[{"role": "assistant", "content": text}] for text in texts],
            "completion_ids": [list(ids) for ids in completion_ids],
            "trainer_state": state,
            "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),
            "prompts": columns.pop("prompt"),
            **columns,
        }

    calls = [partial(reward, **arguments()) for reward in rewards]
    values = [None] * len(rewards)
    with start_blocking_portal() as portal:
        running = [portal.start_task_soon(c) if is_coroutine(c.func) else None for c in calls]
        for i, reward in enumerate(rewards):
            if not running[i]:
                with naming("reward", reward, RewardError, remedy):
                    values[i] = calls[i]()
        for i, reward in enumerate(rewards):
            with naming("reward", reward, RewardError, remedy):
                if running[i]:
                    values[i] = running[i].result()
            values[i] = finite_values(reward_name(reward), values[i], len(texts))
    return torch.tensor(values, dtype=torch.float32).T


def finite_values(name: str, values: Any, n: int) -> list[float]:
    """The `values` that the reward `name` returned for n completions as floats, NaN for None.

    A list, or a tensor or array of one dimension. Raises ValueError or TypeError for anything but a
    finite number or None for each completion.
    """
    if hasattr(values, "tolist") and getattr(values, "ndim", None) == 1:
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        found = f"the reward {name} returned a {type(values).__name__}"
        raise TypeError(f"{found}; return a list with a number or None for each completion.")
    if len(values) != n:
        found = f"the reward {name} returned {len(values)} values for {n} completions"
        raise ValueError(f"{found}; return one for each, None for what could not be scored.")
    numbers = []
    for i, value in enumerate(values):
        found = f"the reward {name} returned {value!r} for completion {i}; return"
        if isinstance(value, str):  # float("7") would pass
            raise TypeError(f"{found} a number or None, not text.")
        try:
            numbers.append(math.nan if value is None else float(value))
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{found} a number or None.") from None
        if value is not None and not abs(numbers[-1]) <= torch.finfo(torch.float32).max:
            raise ValueError(f"{found} a smaller number, or None for what could not be scored.")
    return numbers
