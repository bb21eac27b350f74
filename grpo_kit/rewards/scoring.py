"""Call rewards under TRL's protocol, and refuse what they may not return.

A reward is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, or a
coroutine function. It may take `trainer_state` and `log_metric(name, value)`, as in TRL.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import Tensor

PROTOCOL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")


def reward_name(reward: Callable) -> str:
    """The reward's `__name__`, a partial's function's, else its class's."""
    reward = reward.func if isinstance(reward, partial) else reward
    return getattr(reward, "__name__", type(reward).__name__)


def reward_names(rewards: Sequence[Callable]) -> list[str]:
    """Of the metrics `rewards/<name>/mean`: a second one called `brief` is `brief_2`."""
    names: list[str] = []
    for name in map(reward_name, rewards):
        own, count = name, 1
        while own in names:
            own, count = f"{name}_{count + 1}", count + 1
        names.append(own)
    return names


def is_coroutine(reward: Callable) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def check_columns(reward: Callable, columns: Sequence[str], source: str) -> None:
    """Raise ValueError where the reward needs a column that `source`, named in words, lacks."""
    for name, parameter in inspect.signature(reward).parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        required = parameter.default is parameter.empty and not variadic
        if required and name not in (*PROTOCOL, *columns):
            problem = f"the reward {reward_name(reward)} needs a column {name!r}"
            raise ValueError(f"{problem}, which {source} lacks; it has {', '.join(columns)}.")


def score_texts(*arguments, **options) -> Tensor:
    """What the function that `start_scoring` returns does, in a portal of its own."""
    with start_blocking_portal() as portal:
        return start_scoring(portal, *arguments, **options)()


def start_scoring(
    portal: BlockingPortal, texts: Sequence[str], completion_ids: Sequence,
    examples: Sequence[dict], rewards: Sequence[Callable], state: Any = None,
    logged: dict[str, list[float]] | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Start the coroutine rewards in `portal`; the function returned runs the others and waits.

    It returns the rewards of N texts, one a row of `examples`: (N, R) float32, NaN for None, and
    raises as `finite_values`. `logged` collects what rewards pass to `log_metric`.
    """
    logged = {} if logged is None else logged
    columns = {name: [example[name] for example in examples] for name in examples[0]}
    arguments = {
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": list(completion_ids),
        "trainer_state": state,
        "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),
        "prompts": columns.pop("prompt"),
        **columns,
    }
    calls = [partial(reward, **arguments) for reward in rewards]
    running = [portal.start_task_soon(c) if is_coroutine(c.func) else None for c in calls]

    def finish() -> Tensor:
        values = [None if future else call() for call, future in zip(calls, running, strict=True)]
        for i, reward in enumerate(rewards):
            if running[i]:
                values[i] = running[i].result()
            elif inspect.isawaitable(values[i]):  # of a lambda around a coroutine function
                values[i] = portal.call(lambda i=i: values[i])
            values[i] = finite_values(reward_name(reward), values[i], len(texts))
        return torch.tensor(values, dtype=torch.float32).T

    return finish


def finite_values(name: str, values: Any, n: int) -> list[float]:
    """The `values` that the reward `name` gave for n completions as floats, NaN for None.

    Raises ValueError or TypeError for anything but a finite number or None for each.
    """
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"the reward {name} returned a {type(values).__name__}; return a list.")
    if len(values) != n:
        given = f"{len(values)} values for {n} completions"
        raise ValueError(f"the reward {name} returned {given}; return one each.")
    numbers = []
    for i, value in enumerate(values):
        problem = f"the reward {name} returned {value!r} for completion {i}; return"
        try:
            numbers.append(math.nan if value is None else float(value))
        except (TypeError, ValueError):
            raise TypeError(f"{problem} a number or None.") from None
        if value is not None and not math.isfinite(numbers[-1]):
            raise ValueError(f"{problem} None for what could not be scored.")
    return numbers
