"""Sums, means, moments and whitening over the positions that count.

A mask is boolean, has the shape of its values and says True where a position counts. What lies under the mask may be
anything: it is replaced, never multiplied by 0, so NaN and infinity do not leak into a result or a gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values that count; 0 where none does.

    Args: values (any shape), mask (same shape, bool), dim (the dimension to sum; None: all of them).
    Returns: 0-d, or the shape of values without dim. Padding may hold anything.

    >>> masked_sum(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(4.)
    """
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values that count; 0, not NaN, where none does: an empty completion is an ordinary case.

    Args: values (any shape), mask (same shape, bool), dim (the dimension to average; None: all of them).
    Returns: 0-d, or the shape of values without dim. Padding may hold anything.

    >>> masked_mean(torch.tensor([[1.0, 3.0], [9.0, 9.0]]), torch.tensor([[True, True], [False, False]]), dim=1)
    tensor([2., 0.])
    """
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations from the mean of the values that count.

    Deviations, rather than plain squares, because large values with a small spread would cancel; float64 because the
    moments of many processes are merged.

    Args: values (any shape), mask (same shape, bool). Padding may hold anything.
    Returns: (3,) float64; all 0 where nothing counts. `merge_moments` joins those of several processes.

    >>> masked_moments(torch.tensor([1.0, 3.0, 1e3]), torch.tensor([True, True, False]))
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    exact = values.double()
    mean = masked_mean(exact, mask)
    return torch.stack([mask.sum().double(), mean, masked_sum((exact - mean).square(), mask)])


def merge_moments(moments: Tensor) -> Tensor:
    """Moments of the union of N disjoint sets (Chan, Golub and LeVeque 1979, the pairwise update for N sets).

    Args: moments (N, 3) float64, one `masked_moments` a row; sets of count 0 are neutral.
    Returns: (3,) float64.

    >>> merge_moments(torch.tensor([[1.0, 1.0, 0.0], [1.0, 3.0, 0.0]], dtype=torch.float64))
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    counts, means, deviations = moments.unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (deviations + counts * (means - mean).square()).sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to unit variance and, with shift_mean, to mean 0, as TRL 1.12's `masked_whiten`.

    (values - mean) / sqrt(unbiased variance + 1e-8); shift_mean=False adds the mean back. The variance of fewer than
    two values is 0, so the result is finite whatever counts.

    Args: values (any shape), mask (same shape, bool), moments (3,) of the values that count, over all processes.
    Returns: the shape and dtype of values, 0 at padding.

    >>> values, mask = torch.tensor([1.0, 3.0, 1e3]), torch.tensor([True, True, False])
    >>> whiten(values, mask, masked_moments(values, mask))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    count, mean, deviations = moments.unbind()
    variance = deviations / (count - 1).clamp(min=1)
    whitened = (values.double() - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0).to(values.dtype)


def score_positions(mask: Tensor) -> Tensor:
    """Index of the last token that counts in each row: where a completion's score belongs.

    Args: mask (B, C) bool.
    Returns: (B,) long, -1 for a row without any.

    >>> score_positions(torch.tensor([[True, True, False], [False, False, False]]))
    tensor([ 1, -1])
    """
    positions = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1)
    return F.pad(positions, (1, 0), value=-1).amax(1)  # the extra column answers for empty rows, and for C = 0
