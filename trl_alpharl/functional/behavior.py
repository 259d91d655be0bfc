"""The distribution that exploration samples from, exactly, so that its log-probs can correct for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def behavior_log_probs(
    logits: Tensor, temperature: float, noise: Tensor | None = None, epsilon: float = 0.0, top_p: float = 1.0
) -> Tensor:
    """log mu with mu = (1 - epsilon) softmax(logits / temperature + noise) + epsilon uniform.

    The uniform part is over the whole vocabulary, or over the smallest set of the most likely tokens whose probability
    reaches top_p.

    Args: logits (R, V); temperature > 0; noise (R, V), added to the scaled logits; epsilon in [0, 1); top_p in (0, 1].
    Returns: (R, V) fp32, nats.

    >>> logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    >>> behavior_log_probs(logits, temperature=1.0, epsilon=0.2).exp()
    tensor([[0.4500, 0.4500, 0.0500, 0.0500]])
    >>> behavior_log_probs(logits, temperature=1.0, epsilon=0.2, top_p=0.9).exp()
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    scaled = logits.float() / temperature
    log_probs = torch.log_softmax(scaled if noise is None else scaled + noise, dim=-1)
    if epsilon == 0:
        return log_probs
    return torch.logaddexp(log_probs + math.log1p(-epsilon), _log_uniform(log_probs, top_p) + math.log(epsilon))


def _log_uniform(log_probs: Tensor, top_p: float) -> Tensor:
    if top_p >= 1:
        return torch.full_like(log_probs, -math.log(log_probs.shape[-1]))
    probs, order = log_probs.exp().sort(dim=-1, descending=True)
    inside = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < top_p)
    return torch.where(inside, -inside.sum(-1, keepdim=True).log(), -torch.inf)


def annealed(start: float, share: float, progress: float) -> float:
    """An amount that falls on a straight line from start to 0 over the first `share` of the run; share 0: it stays.

    Args: start >= 0; share in [0, 1]; progress, the share of the run that is over.

    >>> [annealed(0.1, share, progress=0.25) for share in (0.0, 0.25, 0.5)]
    [0.1, 0.0, 0.05]
    """
    return start if share == 0 else start * max(0.0, 1 - progress / share)


def staged_noise(start: float, end: float, progress: float, stages: int = 10) -> float:
    """Noise that falls from start to end in equal ratios, one step a stage (QeRL, arXiv 2510.11696, eq. 9).

    Args: start >= end > 0, or start 0 (none); progress, the share of the run that is over, in [0, 1]; stages >= 2.

    >>> [round(staged_noise(1e-2, 1e-4, progress), 6) for progress in (0.0, 0.09, 0.5, 1.0)]
    [0.01, 0.01, 0.000774, 0.0001]
    """
    if start == 0:
        return 0.0
    stage = min(int(progress * stages), stages - 1)
    return start * (end / start) ** (stage / (stages - 1))
