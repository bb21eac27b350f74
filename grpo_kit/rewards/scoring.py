"""Call rewards under TRL's protocol, and refuse what they may not return.

A reward is `f(prompts, completions, completion_ids, **columns) -> list[float | None]` or a
coroutine function. It is called by keyword, once per batch of complete groups, with every column of
the data; it may take `trainer_state` and `log_metric(name, value)`, as in TRL.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import Tensor

PROTOCOL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")


def reward_name(reward: Callable) -> str:
    """The reward's `__name__`, else its class's; the part of the metric `rewards/<name>/mean`."""
    return getattr(reward, "__name__", type(reward).__name__)


def is_coroutine(reward: Callable) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def check_columns(reward: Callable, columns: Sequence[str], source: str) -> None:
    """Raise ValueError where the reward needs a column that `source`, named in words, lacks."""
    for parameter in inspect.signature(reward).parameters.values():
        needed = (
            parameter.default is parameter.empty
            and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.name not in PROTOCOL
        )
        if needed and parameter.name not in columns:
            raise ValueError(
                f"the reward {reward_name(reward)} needs a column {parameter.name!r}, which "
                f"{source} lacks; it has {', '.join(columns)}."
            )


def score_texts(
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    examples: Sequence[dict],
    rewards: Sequence[Callable],
    state: Any = None,
    logged: dict[str, list[float]] | None = None,
) -> Tensor:
    """Rewards of N texts, (N, R) float32, NaN where a reward returned None.

    `examples` are the rows of data, one a text. A completion reaches a reward as TRL passes it for
    prompts that are messages: a list with one assistant message. `logged` collects what rewards
    pass to `log_metric`.

    Raises ValueError or TypeError, naming the reward, for too few values, a NaN, or no number.
    """
    with start_blocking_portal() as portal:
        return start_scoring(texts, completion_ids, examples, rewards, portal, state, logged)()


def start_scoring(
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    examples: Sequence[dict],
    rewards: Sequence[Callable],
    portal: BlockingPortal,
    state: Any = None,
    logged: dict[str, list[float]] | None = None,
) -> Callable[[], Tensor]:
    """Start the coroutine rewards; the function returned runs the others, waits, and has the table.

    Coroutines run in `portal`, an event loop in another thread, so that other work can go on
    meanwhile (a notebook already has a loop in this one). See `score_texts`.
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

    async def awaited(call: Callable[[], Any]) -> Any:
        return await call()

    pending = {
        i: portal.start_task_soon(awaited, lambda reward=reward: reward(**arguments))
        for i, reward in enumerate(rewards)
        if is_coroutine(reward)
    }

    def finish() -> Tensor:
        results = {i: r(**arguments) for i, r in enumerate(rewards) if i not in pending}
        results |= {i: future.result() for i, future in pending.items()}
        for i, result in results.items():
            if inspect.isawaitable(result):  # of a lambda or partial around a coroutine function
                results[i] = portal.call(awaited, lambda result=result: result)
        values = [
            finite_values(reward_name(reward), results[i], len(texts))
            for i, reward in enumerate(rewards)
        ]
        return torch.tensor(values, dtype=torch.float32).T

    return finish


def finite_values(name: str, values: Any, n: int) -> list[float]:
    """The `values` that the reward `name` gave for n completions as floats, NaN for None.

    Raises ValueError or TypeError, naming the reward, for anything but a finite number or None
    each.
    """
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"the reward {name} returned a {type(values).__name__}; it must return a list of "
            "one number or None a completion."
        )
    if len(values) != n:
        raise ValueError(
            f"the reward {name} returned {len(values)} values for {n} completions; return one each."
        )
    numbers = []
    for i, value in enumerate(values):
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"the reward {name} returned {value!r} for completion {i}; it must be a number or "
                "None."
            ) from None
        if value is not None and not math.isfinite(number):
            raise ValueError(
                f"the reward {name} returned {number} for completion {i}; return None for what "
                "could not be scored."
            )
        numbers.append(number)
    return numbers
