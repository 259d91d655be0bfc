"""PPO's two losses (Schulman et al. 2017, arXiv 1707.06347) as sums over tokens.

A chunk's loss is its sum over tokens divided by the tokens of the whole mini-batch, so the chunks of a mini-batch, and
its processes, add up to the same gradient however the rows are grouped. Positions outside the mask give a loss and a
gradient of exactly 0 whatever they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """A chunk's policy loss, which carries the gradient, and detached sums over its tokens. All 0-d."""

    loss: Tensor
    ratio_sum: Tensor  # of the probability ratios
    clipped_count: Tensor  # tokens for which the clipped term is the larger loss
    approx_kl_sum: Tensor  # of (log ratio)^2 / 2, nats


class ValueLoss(NamedTuple):
    """A chunk's value loss, which carries the gradient, and a detached count. Both 0-d."""

    loss: Tensor
    clipped_count: Tensor  # tokens for which the clipped term is the larger loss


def clipped_surrogate_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange_low: float,
    cliprange_high: float,
    normalizer: float | Tensor,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate objective (eq. 7), negated: max(-A r, -A clip(r, 1 - low, 1 + high)) with r = p / p_old.

    Args: logps, old_logps (B, C) nats, now and at the rollout; advantages (B, C); mask (B, C) bool; normalizer, the
        valid tokens of the whole mini-batch over all processes (0: the loss is 0); weights (B, C), a factor on each
        token's loss. Padding may hold anything.
    Returns: PolicyLoss.

    >>> one, mask = torch.ones(1, 1), torch.tensor([[True]])
    >>> clipped_surrogate_loss(one.log(), (one / 2).log(), one, mask, 0.2, 0.2, normalizer=1)  # ratio 2
    PolicyLoss(loss=tensor(-1.2000), ratio_sum=tensor(2.), clipped_count=tensor(1), approx_kl_sum=tensor(0.2402))
    """
    log_ratio = (logps - old_logps).masked_fill(~mask, 0)
    advantages = advantages.masked_fill(~mask, 0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = torch.maximum(unclipped, clipped)
    if weights is not None:
        losses = losses * weights.masked_fill(~mask, 0)
    with torch.no_grad():
        ratio_sum = ratio.masked_fill(~mask, 0).sum()
        clipped_count = (clipped > unclipped).sum()
        approx_kl_sum = 0.5 * log_ratio.square().sum()
    return PolicyLoss(_over_tokens(losses.sum(), normalizer), ratio_sum, clipped_count, approx_kl_sum)


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange: float,
    normalizer: float | Tensor,
) -> ValueLoss:
    """Squared error to the returns, with the step away from the rollout's value clipped (as PPO's reference code).

    max((V - R)^2, (V_clipped - R)^2) / 2 with V_clipped = V held within cliprange of V_old.

    Args: values, old_values, returns (B, C), in units of return; mask (B, C) bool; normalizer, the valid tokens of the
        whole mini-batch over all processes (0: the loss is 0). Padding may hold anything.
    Returns: ValueLoss.

    >>> zero, mask = torch.zeros(1, 1), torch.tensor([[True]])
    >>> clipped_value_loss(zero + 1, zero, zero + 1, mask, cliprange=0.2, normalizer=1)  # held at 0.2
    ValueLoss(loss=tensor(0.3200), clipped_count=tensor(1))
    """
    values, old_values, returns = (x.masked_fill(~mask, 0) for x in (values, old_values, returns))
    held = values.clamp(old_values - cliprange, old_values + cliprange)
    unclipped = (values - returns).square()
    clipped = (held - returns).square()
    loss = 0.5 * torch.maximum(unclipped, clipped).sum()
    return ValueLoss(_over_tokens(loss, normalizer), (clipped > unclipped).sum())


def positive_nll_loss(logps: Tensor, mask: Tensor, positive: Tensor, normalizer: float | Tensor) -> Tensor:
    """Negative log-likelihood of the completions that succeeded (VAPO, arXiv 2504.05118, section 4.3).

    Args: logps (B, C) nats; mask (B, C) bool; positive (B,) bool, the rows that succeeded; normalizer, the valid tokens
        of the whole mini-batch over all processes (0: the loss is 0). Padding may hold anything.
    Returns: 0-d, in nats.

    >>> logps, mask = torch.tensor([[-1.0, -2.0], [-5.0, -5.0]]), torch.tensor([[True, True], [True, True]])
    >>> positive_nll_loss(logps, mask, torch.tensor([True, False]), normalizer=4)
    tensor(0.7500)
    """
    return _over_tokens(-logps.masked_fill(~(mask & positive.unsqueeze(1)), 0).sum(), normalizer)


def entropy_bonus(entropies: Tensor, mask: Tensor, normalizer: float | Tensor) -> Tensor:
    """Mean entropy of a chunk's tokens as its share of the mini-batch; subtract it, times a coefficient, from the loss.

    Args: entropies (B, C) nats; mask (B, C) bool; normalizer, the valid tokens of the whole mini-batch over all
        processes (0: the bonus is 0). Padding may hold anything.
    Returns: 0-d, in nats.

    >>> entropy_bonus(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]), normalizer=2)
    tensor(1.5000)
    """
    return _over_tokens(entropies.masked_fill(~mask, 0).sum(), normalizer)


def _over_tokens(total: Tensor, normalizer: float | Tensor) -> Tensor:
    return total / (normalizer + (normalizer == 0))  # a mini-batch of empty completions: 0 / 1, not 0 / 0
