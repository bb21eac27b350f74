"""Every formula of GRPO, as pure functions on torch tensors, in the order of one training step.

Nothing here knows a model. Names and numbers follow TRL 1.16; docstrings say where we differ.
Shapes: N completions (complete groups, those of one prompt together), T completion tokens with
padding, R rewards, G completions a group. `mask`, True at trained tokens, is never inferred from
ids (a pad id may be an ordinary token), and what it hides reaches neither loss nor gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from grpo_kit.config import Baseline, Level, LossType, Scale

LOSS_TYPES = get_args(LossType)
IMPORTANCE_SAMPLING_LEVELS = get_args(Level)
SCALES, BASELINES = get_args(Scale), get_args(Baseline)
LOG_RATIO_LIMIT = 20.0  # nats; e^20 is far beyond any clip


def _check_choice(name: str, value: Any, choices: Sequence) -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {value!r}; choose among {known}.")


# --- 1. rewards -----------------------------------------------------------------------------------


def combine_rewards(rewards_per_func: Tensor, weights: Sequence | Tensor | None = None) -> Tensor:
    """Weighted sum of the rewards of each completion; NaN where one of them could not be scored.

    Such a completion leaves its group's mean and std: counting the missing part as 0, as TRL does,
    would punish it for a judge's time-out. The NaN of a reward of weight 0 excludes nobody.

    rewards_per_func: (N, R) float, NaN = not scored. weights: (R,), all 1 by default.
    Returns (N,) float.
    """
    ones = [1.0] * rewards_per_func.shape[1]
    weights = rewards_per_func.new_tensor(ones if weights is None else weights)
    used = weights != 0
    return (rewards_per_func[:, used] * weights[used]).sum(dim=1)


# --- 2. advantages --------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor,
    num_generations: int,
    scale_rewards: str | bool = "group",
    eps: float = 1e-4,
    baseline: str = "group",
) -> Tensor:
    """How much better each completion is than its group: A_i = (R_i - mean(R)) / (std(R) + eps).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; std with ddof 1. Exactly 0 in a group without
    spread (in TRL rounding leaves noise there) or with fewer than two scored completions.

    Args:
        rewards: (N,) float, NaN = not scored: advantage 0, left out of mean and std.
        num_generations: G; the completions of one prompt stand together.
        scale_rewards: "group" divides by the std of the group, "batch" by that of all N rewards
            (arXiv 2508.08221), "none" by nothing (Dr. GRPO, arXiv 2503.20783: the std overweights
            questions that are too easy or too hard), "mean" by the group's mean (MaxRL, arXiv
            2602.02710: of rewards 0 and 1 the gradient is that of log(pass rate), expanded to order
            G - 1: a rarely solved question counts more). True and False mean "group" and "none".
        baseline: the mean that is taken off, of the "group", of the "others" in it (RLOO, arXiv
            2402.14740: G / (G - 1) times as much; with "none" the gradient is unbiased), or of all
            N, which is then one group (REINFORCE++, arXiv 2501.03262; each completion counts once,
            where verl and OpenRLHF weigh mean and std by tokens).

    Returns (N,) float, finite. Raises ValueError for what does not fit or is infinite.
    """
    scale_rewards = {True: "group", False: "none"}.get(scale_rewards, scale_rewards)
    _check_choice("scale_rewards", scale_rewards, SCALES)
    _check_choice("baseline", baseline, BASELINES)
    if rewards.ndim != 1 or not rewards.is_floating_point():
        given = f"{rewards.dtype} of shape {tuple(rewards.shape)}"
        raise ValueError(f"rewards is {given}; give one float a completion, shape (N,).")
    if num_generations < 1 or len(rewards) % num_generations:
        groups = f"groups of num_generations={num_generations}"
        raise ValueError(f"{len(rewards)} rewards cannot be cut into {groups}; give complete ones.")
    if torch.isinf(rewards).any():
        raise ValueError("rewards holds an infinity; give finite values, or NaN for 'not scored'.")

    if scale_rewards == "mean" and (rewards < 0).any():
        raise ValueError("scale_rewards='mean' divides by a mean reward: give none below 0.")

    groups = rewards.view(-1, num_generations) if baseline != "batch" else rewards[None]
    scored = ~groups.isnan()
    lowest = groups.masked_fill(~scored, torch.inf).amin(dim=1, keepdim=True)
    highest = groups.masked_fill(~scored, -torch.inf).amax(dim=1, keepdim=True)
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (_nanstd(groups, dim=1) + eps)
    elif scale_rewards == "batch":
        centred = centred / (_nanstd(rewards, dim=0) + eps)
    elif scale_rewards == "mean":
        centred = centred / (groups.nanmean(dim=1, keepdim=True) + eps)
    if baseline == "others":
        count = scored.sum(dim=1, keepdim=True)
        centred = centred * count / (count - 1)
    return torch.where(scored & (highest > lowest), centred, 0.0).view(-1)


def decoupled_advantages(
    rewards_per_func: Tensor, num_generations: int, weights: Sequence[float] | Tensor | None = None
) -> Tensor:
    """Advantages (N,) for which each reward is normalised within its group before they are summed.

    GDPO (arXiv 2601.05242), TRL's "normalize_then_sum": each reward has the same say, times its
    weight, where in a plain sum the one with the largest spread decides. The sums are normalised
    over the batch. A completion with any NaN among its rewards_per_func, (N, R), has advantage 0.
    """
    unscored = combine_rewards(rewards_per_func, weights).isnan()[:, None]
    scored = rewards_per_func.masked_fill(unscored, torch.nan)
    columns = [group_advantages(column, num_generations) for column in scored.T]
    total = combine_rewards(torch.stack(columns, dim=1).masked_fill(unscored, torch.nan), weights)
    # a group's sum is 0 already: to take the mean off would put rounding where nothing is compared
    return (total / (_nanstd(total, dim=0) + 1e-4)).nan_to_num(0.0)


def _nanstd(values: Tensor, dim: int) -> Tensor:
    """Standard deviation with ddof 1 of what is not NaN, `dim` kept; NaN for fewer than two."""
    variance = (values - values.nanmean(dim, keepdim=True)).square().nanmean(dim, keepdim=True)
    count = (~values.isnan()).sum(dim, keepdim=True)
    return (variance * count / (count - 1)).sqrt()


# --- 3. distance to the reference -----------------------------------------------------------------


def kl_estimate(logps: Tensor, ref_logps: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) at tokens that the policy sampled, one value a token.

    With d = ref_logps - logps, (…) float, nats (http://joschu.net/blog/kl-approx.html):

    - k1 = -d: unbiased, but often negative. Never a loss: its expected gradient is 0.
    - k2 = d^2 / 2: never negative, biased; its expected gradient is the KL's.
    - k3 = exp(d) - d - 1: unbiased and never negative; DeepSeekMath (arXiv 2402.03300) eq. 4.
      Differentiating it does not give the KL's gradient but that of KL(reference || policy).
      Weighting it by the ratio does (`use_bias_correction_kl`).

    Raises ValueError if the shapes differ or the kind is unknown.
    """
    if logps.shape != ref_logps.shape:
        shapes = f"logps has shape {tuple(logps.shape)} but ref_logps {tuple(ref_logps.shape)}"
        raise ValueError(f"{shapes}; score the same tokens.")
    d = ref_logps - logps
    if kind not in ("k1", "k2", "k3"):
        raise ValueError(f"kind is {kind!r}; choose 'k1', 'k2' or 'k3'.")
    # exp(d) - d - 1 would lose every digit, and its sign, near d = 0
    return {"k1": -d, "k2": d.square() / 2, "k3": torch.expm1(d) - d}[kind]


# --- 4. the loss of each token --------------------------------------------------------------------


def importance_weights(train_logps: Tensor, rollout_logps: Tensor, cap: float = 2.0) -> Tensor:
    """min(pi_train / pi_rollout, cap), for a sampler that rounds differently (vLLM, bf16).

    Truncated importance sampling; `cap` is TRL's `vllm_importance_sampling_clip_max` in the mode
    "token_truncate". A token that the sampler could not score (NaN) gets weight 1. Shapes (N, T),
    nats; no gradient.
    """
    log_weights = torch.nan_to_num((train_logps - rollout_logps).detach(), nan=0.0)
    return log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)


def high_entropy(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """The unmasked tokens at which the policy was least sure: the share `quantile` of them.

    Few tokens decide where a solution goes, and learning from the top 20 % alone was as good as
    from all or better (arXiv 2506.01939). As TRL's `top_entropy_quantile`. Give a whole batch, as
    the share is of all its tokens. entropies: (N, T) float, nats; mask: (N, T), True at trained
    tokens. Returns (N, T) bool.
    """
    mask, entropies = mask.bool(), entropies.detach().float()
    if not mask.any():
        return mask
    # numpy's, as torch's takes at most 16 million values
    least = float(np.quantile(entropies[mask].cpu().numpy(), 1 - quantile))
    return mask & (entropies >= least)


def surrogate(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
) -> Tensor:
    """What each token adds to the loss, without its KL: (N, T), 0 where masked.

    With rho = exp(logps - old_logps) (PPO's clip, DeepSeekMath arXiv 2402.03300 eq. 3):

        -min(rho * A, clip(rho, 1 - epsilon, 1 + epsilon_high) * A)

    and for "cispo" (MiniMax-M1, arXiv 2506.13585, eq. 4-5), which cuts off no token's gradient,
    only its weight:

        -stop_gradient(min(rho, epsilon_high)) * A * logps

    Args:
        logps: (N, T) float, nats: the policy's, with gradient, at the temperature it sampled with.
        old_logps: (N, T) float, nats: at the time of sampling; the *same* tensor for every update
            from one batch of rollouts. None = this is the first update: `logps.detach()`.
        advantages: (N,) float.
        mask: (N, T) bool or 0/1, True at trained tokens.
        loss_type: one of `LOSS_TYPES`; all but "cispo" have the same surrogate.
        epsilon: lower clip; the upper too unless `epsilon_high` is given.
        epsilon_high: upper clip (DAPO's clip-higher, arXiv 2503.14476 eq. 10, 0.28). For cispo the
            largest weight itself, not its distance from 1 (TRL quotes 5.0), and required.
        delta: where A < 0, the ratio counts as at most this much (dual clip, arXiv 1912.09729: 3;
            INTELLECT-2, arXiv 2505.07291: 4), since the clip above bounds only the other side. It
            has to be above 1 + epsilon_high. Not for cispo, whose ratio is bounded on both.
        importance_sampling_level: "token", or "sequence" for GSPO (arXiv 2507.18071 eq. 7): one
            ratio a completion, exp of the mean of logps - old_logps (the paper's clips: 3e-4, 4e-4)

    Raises ValueError for shapes that do not fit, an unknown name, or a missing argument.
    """
    _check_choice("loss_type", loss_type, LOSS_TYPES)
    epsilon_high = _epsilon_high(loss_type, epsilon, epsilon_high)
    mask = _checked(logps, advantages, mask, old_logps)

    # torch.where, not `* mask`: 0 * nan is nan, in the loss and again in the gradient.
    advantages = torch.where(mask, advantages[:, None], 0.0)
    logps = torch.where(mask, logps, 0.0)
    ratio = _ratio(logps, old_logps, mask, importance_sampling_level)

    if loss_type == "cispo":
        per_token = -ratio.clamp(max=epsilon_high).detach() * advantages * logps
    else:
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        per_token = -torch.min(bounded * advantages, clipped * advantages)
    return torch.where(mask, per_token, 0.0)


def kl_term(
    logps: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor,
    mask: Tensor,
    *,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
) -> Tensor:
    """The KL (k3) to the reference at each token, (N, T), 0 where masked; arguments as above.

    ref_logps: (N, T) float, nats: the reference's.
    use_bias_correction_kl: multiply it by the ratio, so that its gradient is that of
        KL(policy || reference) (DeepSeek-V3.2, arXiv 2512.02556). False is the original eq. 3.
    """
    mask = mask.bool()
    logps, ref_logps = torch.where(mask, logps, 0.0), torch.where(mask, ref_logps, 0.0)
    kl = kl_estimate(logps, ref_logps)
    if use_bias_correction_kl:
        kl = kl * _ratio(logps, old_logps, mask, importance_sampling_level)
    return torch.where(mask, kl, 0.0)


# --- 5. one number for all tokens -----------------------------------------------------------------


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    num_items_in_batch: int | float | Tensor | None = None,
    num_sequences_in_batch: int | None = None,
) -> Tensor:
    """The loss of a batch from its tokens' losses, each sum over unmasked tokens only.

    | loss_type | aggregation                                      | source                      |
    |-----------|--------------------------------------------------|-----------------------------|
    | grpo      | mean over each completion, then over completions | arXiv 2402.03300 eq. 3      |
    | bnpo      | sum / tokens given in this call                  | TRL                         |
    | dapo      | sum / tokens of the generation batch             | arXiv 2503.14476 eq. 8      |
    | dr_grpo   | sum / (completions x max_completion_length)      | arXiv 2503.20783, section 3 |
    | cispo     | as dapo                                          | arXiv 2506.13585 eq. 4      |

    **Micro-batches.** Give `num_items_in_batch` (dapo, cispo) or `num_sequences_in_batch` (grpo,
    dr_grpo) of the whole batch with every micro-batch and *add up* the losses: the sum is the full
    batch's loss, whatever the split. bnpo is local: divide each by the number of micro-batches.

    Args:
        per_token: (N, T) float, of `surrogate`. mask: (N, T), True at trained tokens.
        max_completion_length: tokens; the divisor of dr_grpo, needed there.
        num_items_in_batch: unmasked tokens of the whole generation batch; `mask.sum()` by default.
        num_sequences_in_batch: completions of the whole batch, with the fully masked; N by default.

    Returns a scalar, 0 with a zero gradient if everything is masked. Raises ValueError for dr_grpo
    without its divisor.
    """
    if loss_type == "dr_grpo" and not max_completion_length:
        raise ValueError("loss_type 'dr_grpo' needs max_completion_length, its divisor in tokens.")
    mask = mask.bool()
    if loss_type in ("grpo", "dr_grpo"):
        completions = len(mask) if num_sequences_in_batch is None else num_sequences_in_batch
        completions = max(completions, 1)
        if loss_type == "dr_grpo":
            return per_token.sum() / (completions * max_completion_length)
        per_completion = per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return per_completion.sum() / completions
    tokens = mask.sum() if loss_type == "bnpo" or num_items_in_batch is None else num_items_in_batch
    return per_token.sum() / torch.as_tensor(tokens, device=per_token.device).clamp(min=1)


def policy_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    **others: Any,
) -> Tensor:
    """The GRPO loss of a batch of completions, by the formulas that their names select.

    Arguments are those of `surrogate`, `aggregate` and `loss_by`. On-policy the loss is normally 0
    (advantages add up to 0): watch the gradient's norm instead.
    """
    by_token = partial(
        surrogate, loss_type=loss_type, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta,
        importance_sampling_level=importance_sampling_level,
    )  # fmt: skip
    of_batch = partial(aggregate, loss_type=loss_type, max_completion_length=max_completion_length)
    batch = (logps, old_logps, advantages, mask)
    level = {"importance_sampling_level": importance_sampling_level}
    return loss_by(by_token, of_batch, *batch, **level, **others)


def loss_by(
    surrogate: Callable,
    aggregate: Callable,
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    token_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logps: Tensor | None = None,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
    turn_weights: Tensor | None = None,
    **totals: Any,
) -> Tensor:
    """The loss of a batch by any `surrogate` and `aggregate`: the policy term, weighted, and a KL.

    Args:
        surrogate: (logps, old_logps, advantages, mask) -> (N, T), as the function of that name.
        aggregate: (per_token, mask, **totals) -> scalar, as the function of that name.
        token_weights: (N, T) float, multiplied onto the policy term of each token, not onto its KL:
            `importance_weights`, `high_entropy`, or their product.
        beta: weight of the KL to ref_logps, see `kl_term`.
        turn_weights: (N,) float, for rows that are turns of episodes: 1 over the number of turns of
            the row's episode. With loss_type "grpo" and `num_sequences_in_batch` the number of
            episodes, the loss is AgentFlow's (arXiv 2510.05592) eq. 10: 1/G over episodes, 1/T_i
            over an episode's turns, 1/|a_i^t| over a turn's tokens.
        totals: num_items_in_batch and num_sequences_in_batch, see `aggregate`.

    Raises ValueError for a shape that does not fit, or a beta without ref_logps.
    """
    if beta and ref_logps is None:
        raise ValueError(f"beta is {beta} but ref_logps is missing; give them, or beta=0.")
    mask = _checked(logps, advantages, mask, old_logps, ref_logps, token_weights)
    per_token = surrogate(logps, old_logps, advantages, mask)
    if token_weights is not None:
        per_token = per_token * torch.where(mask, token_weights, 0.0)
    if beta:
        kl = kl_term(
            logps, old_logps, ref_logps, mask, use_bias_correction_kl=use_bias_correction_kl,
            importance_sampling_level=importance_sampling_level,
        )  # fmt: skip
        per_token = per_token + beta * kl
    if turn_weights is not None:
        per_token = per_token * turn_weights[:, None]
    return aggregate(per_token, mask, **totals)


def _ratio(logps: Tensor, old_logps: Tensor | None, mask: Tensor, level: str) -> Tensor:
    """pi / pi_old, 1 at masked tokens: (N, T) for level "token", (N, 1) for "sequence"."""
    _check_choice("importance_sampling_level", level, IMPORTANCE_SAMPLING_LEVELS)
    old_logps = logps.detach() if old_logps is None else old_logps.detach()
    log_ratio = torch.where(mask, logps - torch.where(mask, old_logps, 0.0), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    # exp(88) is infinite, and 0 * infinity a NaN gradient; verl, OpenRLHF and SkyRL clamp as well
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _epsilon_high(loss_type: str, epsilon: float, epsilon_high: float | None) -> float:
    if epsilon_high is None and loss_type == "cispo":
        # Trap: TRL falls back to epsilon, which would cap every token's weight at 0.2.
        raise ValueError("loss_type 'cispo' needs epsilon_high, the largest ratio; try 5.0.")
    return epsilon if epsilon_high is None else epsilon_high


def _checked(logps, advantages, mask, old_logps, ref_logps=None, token_weights=None) -> Tensor:
    """Refuse shapes that would broadcast in silence; return the mask as bool."""
    if logps.ndim != 2:
        raise ValueError(f"logps has shape {tuple(logps.shape)}; give (N, T), a row a completion.")
    given = {"mask": mask, "old_logps": old_logps, "ref_logps": ref_logps}
    given["token_weights"] = token_weights
    for name, tensor in (given | {"advantages": advantages}).items():
        expected = tuple(logps.shape[:1] if name == "advantages" else logps.shape)
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; give shape {expected}.")
    return mask.bool()


# --- 6. what to log -------------------------------------------------------------------------------


@torch.no_grad()
def policy_loss_stats(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling_level: str = "token",
    **others: Any,
) -> dict[str, float]:
    """Share of tokens (completions, for level "sequence") whose ratio was clipped, named as in TRL.

    Takes the arguments of `policy_loss`. A clip counts only where it takes the gradient away: below
    with A < 0, above with A > 0.
    """
    epsilon_high = _epsilon_high(loss_type, epsilon, epsilon_high)
    mask = _checked(logps, advantages, mask, old_logps)
    ratio = _ratio(logps, old_logps, mask, importance_sampling_level)
    if importance_sampling_level == "sequence":  # one ratio a completion, which is counted once
        mask = mask.any(dim=1, keepdim=True)
    if loss_type == "cispo":
        high = clip_shares(ratio > epsilon_high, advantages, mask)["clip_ratio/high_mean"]
        return {"cispo_clip_ratio": high}
    better = advantages[:, None] > 0
    clipped = torch.where(better, ratio > 1 + epsilon_high, ratio < 1 - epsilon)
    return clip_shares(clipped, advantages, mask)


def clip_shares(clipped: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Shares of unmasked tokens that are `clipped`: with an advantage below 0, above, and both."""
    sides = {"low": advantages < 0, "high": advantages > 0, "region": advantages != 0}
    clipped, tokens = clipped & mask, mask.sum().clamp(min=1)
    return {
        f"clip_ratio/{side}_mean": ((clipped & rows[:, None]).sum() / tokens).item()
        for side, rows in sides.items()
    }


@torch.no_grad()
def mean_kl(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> float:
    """The mean KL (k3, nats a token) to the reference over the unmasked tokens."""
    options = {"use_bias_correction_kl": False}
    return (kl_term(logps, None, ref_logps, mask, **options).sum() / mask.sum().clamp(min=1)).item()
