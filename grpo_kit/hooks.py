"""A reader's own advantages, surrogate or aggregation in place of the package's.

`train` calls the functions of `objective` that the config selects, or those that it is given. A
hook's result is checked here, so that a wrong shape ends in a sentence instead of a broadcast.
Properties on which the loop saves work are tried out on small tensors, of any function: whether a
batch may be cut into parts (`adds_up`, `acts_by_row`), and whether rows without advantage may be
left out (`ignores_zero_advantages`).
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kit import objective
from grpo_kit.config import GRPOConfig
from grpo_kit.rewards.scoring import naming
from grpo_kit.rewards.scoring import reward_name as hook_name

CALLS = {  # how each hook is called
    "advantages": "advantages(rewards, num_generations)",
    "surrogate": "surrogate(logps, old_logps, advantages, mask)",
    "aggregate": "aggregate(per_token, mask, *, num_items_in_batch, num_sequences_in_batch)",
    "batch_source": "batch_source(prompts)",
}
TOTALS = ("num_items_in_batch", "num_sequences_in_batch")


def check_hook(kind: str, hook: Any) -> None:
    """Raise TypeError where `hook` cannot be called as CALLS[kind] says."""
    if not callable(hook):
        raise TypeError(f"{kind} is {hook!r}; give a function, called as {CALLS[kind]}.")
    names = CALLS[kind].partition("(")[2].rstrip(")").replace(" *,", "").split(", ")
    totals = {name: None for name in names if name in TOTALS}
    try:
        inspect.signature(hook).bind(*names[: len(names) - len(totals)], **totals)
    except TypeError as error:
        problem = f"the {kind} hook {hook_name(hook)} cannot be called as {CALLS[kind]}"
        raise TypeError(f"{problem}: {error}.") from None


def _result(
    kind: str, hook: Callable, arguments: tuple, shape: tuple, meaning: str, **totals: Any
) -> Tensor:
    """What `hook` returns, a tensor of `shape`, with a gradient where its first argument has one.

    Raises ValueError with its name for anything else, and for what it raises itself.
    """
    tensors = [given for given in arguments if isinstance(given, Tensor)]
    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
    with naming(f"{kind} hook", hook, ValueError, f"It was given tensors of shapes {shapes}."):
        value = hook(*arguments, **totals)
    found = tuple(value.shape) if isinstance(value, Tensor) else None
    returned = f"the {kind} hook {hook_name(hook)} returned"
    if found != shape:
        other = type(value).__name__ if found is None else f"a tensor of shape {found}"
        raise ValueError(f"{returned} {other}; return a tensor of shape {shape}, {meaning}.")
    if tensors[0].requires_grad and not value.requires_grad:
        raise ValueError(f"{returned} no gradient; compute it without detach() or no_grad().")
    return value


def _check_finite(kind: str, hook: Callable, values: Tensor, hint: str = "") -> None:
    if not values.isfinite().all():
        value = values[~values.isfinite()].flatten()[0]
        raise FloatingPointError(f"the {kind} hook {hook_name(hook)} returned {value:g}{hint}")


def advantages_by(hook: Callable | None, config: GRPOConfig) -> Callable:
    """`hook` with its result checked, or what the config selects: (rewards, G) -> (N,) float.

    Completions that were not scored (reward NaN) get advantage 0, whatever the hook gives them.
    """
    if hook is None:
        options = {"scale_rewards": config.scale_rewards, "baseline": config.baseline}
        return partial(objective.group_advantages, **options)
    check_hook("advantages", hook)
    if config.multi_objective_aggregation == "normalize_then_sum":
        problem = "an advantages hook gets one reward a completion, the weighted sum"
        remedy = "choose multi_objective_aggregation='sum_then_normalize'"
        raise ValueError(f"{problem}, but 'normalize_then_sum' compares each by itself: {remedy}.")

    def checked(rewards: Tensor, num_generations: int) -> Tensor:
        given, shape = (rewards.clone(), num_generations), tuple(rewards.shape)
        values = _result("advantages", hook, given, shape, "one value a completion")
        values = torch.where(rewards.isnan(), 0.0, values.detach().float())
        hint = " (a NaN reward means 'not scored', and a group's std may be 0)"
        _check_finite("advantages", hook, values, hint)
        return values

    return checked


def surrogate_by(hook: Callable | None, config: GRPOConfig) -> Callable:
    """`hook` with its result checked, or the config's: (logps, old_logps, A, mask) -> (N, T)."""
    if hook is None:
        return partial(
            objective.surrogate, loss_type=config.loss_type, epsilon=config.epsilon,
            epsilon_high=config.epsilon_high, delta=config.delta,
            importance_sampling_level=config.importance_sampling_level,
        )  # fmt: skip
    check_hook("surrogate", hook)

    def checked(logps: Tensor, old_logps: Tensor | None, advantages, mask: Tensor) -> Tensor:
        old_logps = logps.detach() if old_logps is None else old_logps
        given, shape = (logps, old_logps, advantages, mask), tuple(logps.shape)
        per_token = _result("surrogate", hook, given, shape, "what each token adds to the loss")
        _check_finite("surrogate", hook, per_token[mask])
        return torch.where(mask, per_token, 0.0)

    return checked


def aggregate_by(hook: Callable | None, config: GRPOConfig) -> Callable:
    """`hook` with its result checked, or the config's: (per_token, mask, **totals) -> scalar."""
    if hook is None:
        options = {"max_completion_length": config.max_completion_length}
        return partial(objective.aggregate, loss_type=config.loss_type, **options)
    check_hook("aggregate", hook)

    def checked(per_token: Tensor, mask: Tensor, **totals: Any) -> Tensor:
        given = (per_token, mask)
        loss = _result("aggregate", hook, given, (), "the loss of the batch", **totals)
        _check_finite("aggregate", hook, loss)
        return loss

    return checked


def adds_up(aggregate: Callable) -> bool:
    """Whether the losses of a batch's parts, given the batch's totals, add up to the batch's loss.

    "bnpo" does not, nor what divides by `mask.sum()` or by a side of `mask`: of such a function the
    mean over the parts is taken, no row is left out, and on a CPU the batch is cut only where
    asked. A part is as wide as its longest row.
    """
    mask = torch.arange(5) < torch.tensor([5, 2, 4, 3])[:, None]
    per_token = torch.where(mask, torch.linspace(-1, 2, 20).view(4, 5), 0.0).requires_grad_()
    totals = {"num_items_in_batch": mask.sum(), "num_sequences_in_batch": 4}
    whole = aggregate(per_token, mask, **totals)
    parts = aggregate(per_token[:1], mask[:1], **totals) + aggregate(
        per_token[1:, :4], mask[1:, :4], **totals
    )
    return torch.isclose(whole, parts, rtol=1e-4, atol=1e-6).item()


def ignores_zero_advantages(surrogate: Callable) -> bool:
    """Whether tokens without advantage get no gradient, so that their rows may be left out."""
    mixed = torch.tensor([0.0, 1.5, -1.0]).repeat(3)
    return not (_gradient(surrogate, 0 * mixed).any() or _gradient(surrogate, mixed)[::3].any())


def acts_by_row(surrogate: Callable) -> bool:
    """Whether what a row adds hangs on that row alone, so that a batch may be cut into parts."""
    advantages = torch.tensor([0.5, 1.5, -1.0]).repeat(3)
    whole = _gradient(surrogate, advantages)
    try:
        parts = [_gradient(surrogate, advantages, rows) for rows in (slice(1, 3), slice(3, 9))]
        parts.append(_gradient(surrogate, advantages, slice(0, 1)))
    except ValueError:  # it wants the whole batch
        return False
    return torch.allclose(whole, sum(parts), rtol=1e-4, atol=1e-6)


def _gradient(surrogate: Callable, advantages: Tensor, rows: slice = slice(None)) -> Tensor:
    """Of the sum over some of nine rows, trimmed to the longest, with respect to all of them.

    Probabilities reach from e^-9 to nearly 1, ratios from e^-2 to e^2.
    """
    old = torch.linspace(-9, -0.01, 40).expand(9, 40)
    logps = (old + torch.linspace(-2, 2, 9)[:, None]).clamp(max=-1e-4).requires_grad_()
    lengths = torch.tensor([40, 30, 39, 38, 20, 37, 36, 10, 35])
    part = rows, slice(int(lengths[rows].max()))
    mask = torch.arange(40) < lengths[:, None]
    try:
        per_token = surrogate(logps[part], old[part], advantages[rows], mask[part])
    except FloatingPointError as error:
        raise ValueError(f"{error}, when it was tried out on small tensors.") from error
    return torch.autograd.grad(per_token.sum(), logps)[0]


def cut_off_stats(
    surrogate: Callable, logps: Tensor, old_logps: Tensor | None, advantages: Tensor, mask: Tensor
) -> dict[str, float]:
    """Shares of tokens from which a hook takes the gradient away, see `objective.clip_shares`.

    For the clip of `objective.surrogate` they are those that `objective.policy_loss_stats` counts.
    """
    with torch.enable_grad():
        variable = logps.detach().requires_grad_()
        old_logps = variable.detach() if old_logps is None else old_logps
        per_token = surrogate(variable, old_logps, advantages, mask)
        (gradient,) = torch.autograd.grad(per_token.sum(), variable)
    return objective.clip_shares(gradient == 0, advantages, mask)
