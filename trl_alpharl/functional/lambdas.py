"""GAE's lambda over the run and over the length of a completion."""

from __future__ import annotations

from torch import Tensor


def scheduled_lambda(start: float, end: float, progress: float) -> float:
    """Lambda on the straight line from start to end.

    Args: start and end in [0, 1]; progress, the share of the run that is over, in [0, 1].

    >>> round(scheduled_lambda(0.95, 0.85, progress=0.5), 6)
    0.9
    """
    return start + (end - start) * progress


def length_adaptive_lambda(lengths: Tensor, scale: float) -> Tensor:
    """Lambda of each completion: 1 - 1 / (scale x length) (VAPO, arXiv 2504.05118, section 4.2).

    The sum of GAE's weights, about 1 / (1 - lambda), then grows with the length; 0 where scale x length is below 1.

    Args: lengths (B,) tokens; scale > 0, a token (VAPO: 0.05).
    Returns: (B,) fp32 in [0, 1).

    >>> length_adaptive_lambda(__import__("torch").tensor([10, 100, 1000]), scale=0.05)
    tensor([0.0000, 0.8000, 0.9800])
    """
    return (1 - 1 / (scale * lengths.float().clamp(min=1))).clamp(min=0)
