"""Advantages and value targets, and how well the values predict them."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import masked_moments


def compute_gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t. A completion ends at its last token: the
    value after it is 0, and nothing that padding holds enters.

    Args: token_rewards (B, C), values (B, C), the estimate before each token is produced, mask (B, C) bool, padded on
        the right; gamma and lam in [0, 1], lam one number or (B,), one a completion.
    Returns: advantages (B, C) and returns = advantages + values (B, C), fp32, 0 at padding.
    Raises: ValueError for a mask with a gap: the scan would carry value across it.

    >>> mask = torch.tensor([[True, True, False]])
    >>> compute_gae(torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[0.5, 0.5, 9.0]]), mask, gamma=1.0, lam=1.0)
    (tensor([[0.5000, 0.5000, 0.0000]]), tensor([[1., 1., 0.]]))
    """
    gaps = (mask[:, 1:] & ~mask[:, :-1]).any(1)
    if gaps.any():
        row = int(gaps.nonzero()[0])
        raise ValueError(
            f"completion_mask: row {row} counts a token after one it does not, must be padded on the right"
        )
    rewards = token_rewards.float().masked_fill(~mask, 0)
    values = values.float().masked_fill(~mask, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):  # past a row's end all terms are 0, so its own end starts the recursion
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def compute_gae_with_entropy(
    token_rewards: Tensor,
    values: Tensor,
    entropies: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    entropy_coef: float,
) -> tuple[Tensor, Tensor]:
    """GAE over entropy-augmented rewards r_t + coef H_t: uncertain tokens, and those that lead to them, gain.

    The maximum-entropy objective (Haarnoja et al. 2018, arXiv 1801.01290, eq. 1) under `compute_gae`; equal to it at
    entropy_coef 0.

    Args: as of `compute_gae`; entropies (B, C) nats, of the policy's next-token distribution at each token;
        entropy_coef, in reward a nat. Padding may hold anything.
    Returns: advantages and returns (B, C), fp32, 0 at padding.

    >>> mask, zero = torch.tensor([[True, True]]), torch.zeros(1, 2)
    >>> compute_gae_with_entropy(zero, zero, torch.tensor([[1.0, 2.0]]), mask, gamma=1.0, lam=1.0, entropy_coef=0.5)[0]
    tensor([[1.5000, 1.0000]])
    """
    return compute_gae(entropy_augmented(token_rewards, entropies, mask, entropy_coef), values, mask, gamma, lam)


def entropy_augmented(token_rewards: Tensor, entropies: Tensor, mask: Tensor, entropy_coef: float) -> Tensor:
    """r_t + coef H_t.

    Args: token_rewards (B, C); entropies (B, C) nats; mask (B, C) bool; entropy_coef, in reward a nat. Entropies of
        padding may be anything.
    Returns: (B, C).

    >>> mask = torch.tensor([[True, False]])
    >>> entropy_augmented(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, torch.nan]]), mask, entropy_coef=0.5)
    tensor([[2., 0.]])
    """
    return token_rewards + entropy_coef * entropies.masked_fill(~mask, 0)


def mean_baseline_advantages(returns: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """Advantages over the batch's mean return instead of over a critic (EVPO, arXiv 2604.19485, for EV <= 0).

    A critic whose explained variance is not above 0 predicts worse than that mean does.

    Args: returns (B, C), discounted rewards to go (lambda = 1); mask (B, C) bool; mean (0-d), of the returns that
        count, over all processes. Padding may hold anything.
    Returns: (B, C), 0 at padding.

    >>> mask = torch.tensor([[True, True, False]])
    >>> mean_baseline_advantages(torch.tensor([[1.0, 3.0, 9.0]]), mask, mean=torch.tensor(2.0))
    tensor([[-1.,  1.,  0.]])
    """
    return (returns - mean.to(returns.dtype)).masked_fill(~mask, 0)


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the returns' variance that the values predict: 1 - Var(returns - values) / Var(returns).

    1 is a perfect critic, 0 one no better than a constant, below 0 worse. Returns that do not vary: 0.

    Args: returns, values (one shape), mask (same shape, bool; None: all count).
    Returns: 0-d float64. Padding may hold anything.

    >>> explained_variance(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
    tensor(1., dtype=torch.float64)
    """
    if mask is None:
        mask = torch.ones_like(returns, dtype=torch.bool)
    return explained_variance_from_moments(masked_moments(returns - values, mask), masked_moments(returns, mask))


def explained_variance_from_moments(error_moments: Tensor, return_moments: Tensor) -> Tensor:
    """`explained_variance` from moments that several processes merged.

    A spread of the returns below fp32's rounding of their mean counts as none: there the result is 0.

    Args: error_moments (3,), of returns - values, and return_moments (3,), both from `masked_moments`, same positions.
    Returns: 0-d float64.

    >>> moments = torch.tensor([[4.0, 0.0, 1.0], [4.0, 2.0, 4.0]], dtype=torch.float64)
    >>> explained_variance_from_moments(moments[0], moments[1])
    tensor(0.7500, dtype=torch.float64)
    """
    count, mean, deviations = return_moments.unbind()
    constant = deviations <= count * (torch.finfo(torch.float32).eps * mean).square()
    return torch.where(constant, 0, 1 - error_moments[2] / torch.where(constant, 1, deviations))
