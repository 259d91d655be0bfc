"""PopArt: a critic that predicts returns in units of their own spread, while what it says stays the same.

van Hasselt et al. 2016 (arXiv 1602.07714): when the mean and spread of the targets move, the last layer is rescaled so
that no prediction changes; only the units in which it learns do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rescale_head(
    weight: Tensor, bias: Tensor, old: tuple[float, float], new: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Weight and bias in the units of `new` that give the predictions they gave in the units of `old`.

    With y = s (w h + b) + m: w' = w s / s' and b' = (s b + m - m') / s'.

    Args: weight (1, H), bias (1,); old and new, mean m and spread s > 0 of the returns.
    Returns: (1, H) and (1,).

    >>> rescale_head(torch.tensor([[2.0]]), torch.tensor([1.0]), old=(0.0, 1.0), new=(3.0, 2.0))
    (tensor([[1.]]), tensor([-1.]))
    """
    (old_mean, old_spread), (mean, spread) = old, new
    return weight * (old_spread / spread), (old_spread * bias + old_mean - mean) / spread


class PopArt:
    """Mean and spread of the returns as exponential averages, and the way in and out of their units.

    Args: decay in [0, 1), of the averages of mean and mean square, a rollout.

    >>> popart = PopArt(decay=0.0)
    >>> old, new = popart.update(torch.tensor([2.0, 5.0, 18.0], dtype=torch.float64))  # mean 5, variance 18 / 2
    >>> old, new
    ((0.0, 1.0), (5.0, 3.0))
    >>> popart.normalize(torch.tensor([8.0])), popart.denormalize(torch.tensor([1.0]))
    (tensor([1.]), tensor([8.]))
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.mean, self.spread = 0.0, 1.0
        self._seen = False

    def update(self, moments: Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
        """Let the moments (3,) of a rollout's returns, from `masking.masked_moments`, change mean and spread.

        Returns: the old and the new pair, for `rescale_head`. A spread of 0 leaves the spread as it was.
        """
        old = (self.mean, self.spread)
        count, mean, deviations = moments.tolist()
        if count > 0:
            keep = self.decay if self._seen else 0.0
            square = keep * (self.spread**2 + self.mean**2) + (1 - keep) * (deviations / count + mean**2)
            self.mean = keep * self.mean + (1 - keep) * mean
            variance = square - self.mean**2
            if variance > torch.finfo(torch.float32).eps * square:
                self.spread = variance**0.5
            self._seen = True
        return old, (self.mean, self.spread)

    def normalize(self, returns: Tensor) -> Tensor:
        """Returns in the units that the critic learns in; any shape."""
        return (returns - self.mean) / self.spread

    def denormalize(self, values: Tensor) -> Tensor:
        """What the critic says, in units of return; any shape."""
        return values * self.spread + self.mean

    def state_dict(self) -> dict[str, Any]:
        """Mean, spread and whether they are more than the start values."""
        return {"mean": self.mean, "spread": self.spread, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved statistics."""
        self.mean, self.spread, self._seen = state["mean"], state["spread"], state["seen"]
