"""Adam's moments of a projected gradient, and how they move to another basis.

In place of Adam's one step counter each row of the moments has a mass: the sum of the weights of the gradients that it
has seen, 1 - beta^t in a basis that never changed. A new basis may see directions that the old one did not; their rows
start with less mass and are not taken for zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Adam's state of one projected gradient (r, n).

    mean, square (r, n): running sums (1 - beta) beta^age g and g^2, fp32.
    mean_mass, square_mass (r,): the sum of the weights in each row, in [0, 1]; 0 for a row that has seen nothing.
    """

    mean: Tensor
    square: Tensor
    mean_mass: Tensor
    square_mass: Tensor


def empty_moments(rows: int, columns: int, device: torch.device | str = "cpu") -> Moments:
    """Moments (rows, columns) that have seen nothing.

    >>> empty_moments(2, 3).mean.shape
    torch.Size([2, 3])
    """
    zeros = torch.zeros(rows, columns, device=device)
    return Moments(zeros, zeros.clone(), torch.zeros(rows, device=device), torch.zeros(rows, device=device))


def update_moments(moments: Moments, gradient: Tensor, betas: tuple[float, float]) -> Moments:
    """Take in a projected gradient (r, n). Works in place on `mean` and `square`.

    >>> moments = update_moments(empty_moments(1, 1), torch.tensor([[2.0]]), (0.9, 0.99))
    >>> [round(float(x), 4) for x in moments]
    [0.2, 0.04, 0.1, 0.01]
    """
    beta1, beta2 = betas
    return Moments(
        moments.mean.lerp_(gradient, 1 - beta1),
        moments.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2),
        moments.mean_mass * beta1 + (1 - beta1),
        moments.square_mass * beta2 + (1 - beta2),
    )


def adam_direction(moments: Moments, eps: float) -> Tensor:
    """Adam's direction (r, n): mean over root mean square, each divided by its mass. Rows without mass give 0.

    >>> moments = update_moments(empty_moments(1, 2), torch.tensor([[2.0, -3.0]]), (0.9, 0.99))
    >>> adam_direction(moments, eps=0.0).round(decimals=4).tolist()
    [[1.0, -1.0]]
    """
    # (mean / c1) / (sqrt(square / c2) + eps), with the masses c1, c2 brought to the rows: fewer passes over the moments
    spread = moments.square_mass.sqrt()[:, None]
    root = moments.square.sqrt().add_(eps * spread)
    return torch.div(moments.mean, root, out=root).mul_(spread * _inverse(moments.mean_mass)[:, None])


def transport_moments(moments: Moments, change: Tensor) -> Moments:
    """Moments (r', n) in another basis.

    The mean moves as a vector. The variance moves as that of independent coordinates, and is divided by what share of a
    new direction the old basis saw. A new direction keeps the mass of those that it is made of.

    Args: change (r', r) = new_basis^T old_basis; r' may be another rank.

    >>> moments = Moments(torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [0.0]]), torch.ones(2), torch.ones(2))
    >>> swapped = transport_moments(moments, torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    >>> swapped.mean.flatten().tolist(), swapped.mean_mass.tolist()
    ([0.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    """
    squared = change.square()
    seen = squared.sum(1).clamp_(max=1.0)
    mean = _over(moments.mean, moments.mean_mass)
    variance = (_over(moments.square, moments.square_mass) - mean.square()).clamp_(min=0.0)
    new_mean = change @ mean
    new_square = _over(squared @ variance + new_mean.square(), seen)
    mean_mass = (squared @ moments.mean_mass).clamp_(max=1.0)
    square_mass = (squared @ moments.square_mass).clamp_(max=1.0)
    return Moments(new_mean * mean_mass[:, None], new_square * square_mass[:, None], mean_mass, square_mass)


def resize_moments(moments: Moments, rows: int) -> Moments:
    """The same rows under another basis, as most code does it: cut, or filled with rows that have seen nothing.

    What `transport_moments` is measured against; the moments then belong to directions that are gone.

    >>> resize_moments(empty_moments(2, 3), 4).mean.shape
    torch.Size([4, 3])
    """
    kept = min(rows, len(moments.mean))
    fresh = empty_moments(rows, moments.mean.shape[1], moments.mean.device)
    for new, old in zip(fresh, moments):
        new[:kept] = old[:kept]
    return fresh


def channel_scales(gradient: Tensor, direction: Tensor) -> Tensor:
    """How much longer Adam's direction is than the gradient in each channel (n,), both (r, n); 0 where it is 0.

    The factor by which APOLLO (Zhu et al. 2024, arXiv 2412.05270, section 4) scales each channel of the full gradient:
    the norms of a random projection stand for those of the whole.

    >>> channel_scales(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    length = gradient.norm(dim=0)
    return torch.where(length > 0, direction.norm(dim=0) / length, 0.0)


def _over(rows: Tensor, mass: Tensor) -> Tensor:
    """rows (r, n) divided by their mass (r,); 0 where there is none."""
    return rows * _inverse(mass)[:, None]


def _inverse(mass: Tensor) -> Tensor:
    return torch.where(mass > 0, mass.reciprocal(), 0.0)
