"""Tokens that another policy sampled: exploration and replay.

mu is the policy that sampled a token, pi_old the one that the update starts from. The policy loss keeps its ratio
pi / pi_old and is weighted by rho = min(rho_max, pi_old / mu), once and at each token alone; advantages are plain GAE
under pi_old's values. Only the value targets carry the correction along the completion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance_weights(old_logps: Tensor, behavior_logps: Tensor, mask: Tensor, largest: float) -> Tensor:
    """min(largest, pi_old / mu) of each token; exactly 1 where the two agree and largest >= 1.

    Args: old_logps and behavior_logps (B, C) nats; mask (B, C) bool; largest > 0. Padding may hold anything.
    Returns: (B, C), 0 at padding.

    >>> half, mask = torch.full((1, 2), 0.5).log(), torch.tensor([[True, False]])
    >>> importance_weights(half, torch.tensor([[0.25, 1.0]]).log(), mask, largest=3.0)
    tensor([[2., 0.]])
    """
    log_ratio = (old_logps - behavior_logps).masked_fill(~mask, 0)
    return log_ratio.clamp(max=math.log(largest)).exp().masked_fill(~mask, 0)


def vtrace_targets(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    rho: Tensor,
    c: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """V-trace value targets (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 with c = lambda min(c_max, pi_old / mu)).

    v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma lam c_t (v_{t+1} - V_{t+1}). With rho = c = 1 these are the
    GAE returns. A completion ends at its last token: the value after it is 0.

    Args: token_rewards, values (B, C), in units of return; mask (B, C) bool, padded on the right; rho and c (B, C),
        from `importance_weights`; gamma and lam in [0, 1]. Padding may hold anything.
    Returns: (B, C) fp32, 0 at padding.

    >>> mask, one = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2)
    >>> vtrace_targets(torch.tensor([[0.0, 1.0]]), 0.5 * one, mask, rho=0.5 * one, c=0.5 * one, gamma=1.0, lam=1.0)
    tensor([[0.6250, 0.7500]])
    """
    rewards, values, rho, c = (x.float().masked_fill(~mask, 0) for x in (token_rewards, values, rho, c))
    targets = torch.zeros_like(values)
    next_value = next_excess = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rho[:, t] * (rewards[:, t] + gamma * next_value - values[:, t])
        next_excess = delta + gamma * lam * c[:, t] * next_excess
        next_value = values[:, t]
        targets[:, t] = next_value + next_excess
    return targets
