"""Reward scales that follow the run: where a batch of scores lies, how wide it is, and scores in those units.

Every scaler is a small state machine over the F components of a reward. They share one interface and the table
`REWARD_SCALERS`: `update` with a batch of raw rewards, then `scale` any raw rewards, replayed ones too. Statistics are
fp64. NaN means that a reward function gave no opinion; it neither counts nor changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_IQR_OF_NORMAL = 1.349  # interquartile range of a unit normal
_ABSOLUTE_DEVIATION_OF_NORMAL = 1.2533  # its standard deviation over its mean absolute deviation
_COLLAPSED = 0.1  # an IQR this small beside the mean absolute deviation says nothing about the spread
_FARTHEST = 40.0  # deviations count up to this many IQR scales, so that outliers cannot make the IQR look collapsed
_JUMP = 3.0  # two scales within this factor are about one; a batch beyond it starts the average anew


def apply_dynamic_scaling(
    scores: Tensor, center: Tensor | float, scale: Tensor | float, clip: float, min_scale: float = 0.0
) -> Tensor:
    """Scores in units of their own spread: clip((x - center) / max(scale, min_scale), -clip, clip).

    Where the scale is 0, or below fp32's rounding of the center, all scores so far were equal: nothing can be said
    about which one is better, and the result is 0.

    Args: scores (..., F), NaN = no opinion; center and scale (F,) or numbers, in units of the scores, scale >= 0; clip
        > 0, in scales; min_scale >= 0, in units of the scores.
    Returns: the shape and dtype of scores; NaN stays NaN.

    >>> apply_dynamic_scaling(torch.tensor([1.0, 2.0, 900.0]), center=1.0, scale=2.0, clip=3.0)
    tensor([0.0000, 0.5000, 3.0000])
    >>> apply_dynamic_scaling(torch.tensor([5.0, 5.0]), center=5.0, scale=0.0, clip=3.0)
    tensor([0., 0.])
    """
    middle = torch.as_tensor(center, dtype=scores.dtype, device=scores.device)
    width = torch.as_tensor(scale, dtype=scores.dtype, device=scores.device).clamp(min=min_scale)
    flat = width <= torch.finfo(torch.float32).eps * middle.abs()
    scaled = ((scores - middle) / width.masked_fill(flat, 1)).clamp(-clip, clip)
    return torch.where(flat & ~scores.isnan(), 0.0, scaled)


def robust_statistics(scores: Tensor, expected: float | None = None) -> tuple[float, float]:
    """Median and IQR / 1.349 of a batch, or mean and 1.2533 x mean absolute deviation where the IQR says nothing.

    The IQR of rare successes (0, 0, 0, 0, 1) is 0 though the scores vary; a scale at most a tenth of the mean absolute
    deviation counts as such. Deviations enter that comparison up to 40 IQR scales, so fewer than about 18 % outliers,
    however far, leave the robust pair in place; an IQR scale within a factor 3 of the expected one is believed anyway.

    Args: scores (N,), N >= 1, finite; expected, the scale of earlier batches, if any.
    Returns: center and scale, in units of the scores; scale 0 where all scores are equal.

    >>> center, scale = robust_statistics(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1e6]))
    >>> center, round(scale, 4)
    (4.5, 3.3358)
    >>> center, scale = robust_statistics(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    >>> center, round(scale, 4)
    (0.2, 0.2507)
    """
    exact = scores.double()
    low, center, high = torch.quantile(exact, torch.tensor([0.25, 0.5, 0.75], dtype=exact.dtype, device=exact.device))
    scale = (high - low) / _IQR_OF_NORMAL
    deviations = exact - center
    if scale > torch.finfo(torch.float32).eps * deviations.abs().mean():  # below it is rounding of equal scores
        deviations = deviations.clamp(-_FARTHEST * scale, _FARTHEST * scale)
    wide = _ABSOLUTE_DEVIATION_OF_NORMAL * deviations.abs().mean()
    believed = expected is not None and _comparable(float(scale), expected)
    if scale <= _COLLAPSED * wide and not believed:
        return float(center + deviations.mean()), float(wide)
    return float(center), float(scale)


def _comparable(scale: float, other: float) -> bool:
    return scale <= _JUMP * other and other <= _JUMP * scale


class _Scaler:
    """What the scalers share: scaling with the statistics at hand, and their state of plain numbers."""

    def __init__(self, clip: float = 3.0, min_scale: float = 0.0) -> None:
        self.clip, self.min_scale = clip, min_scale
        self.center: list[float | None] = []  # F; None where no score was seen yet
        self.spread: list[float] = []

    def update(self, rewards: Tensor) -> None:
        """Let a batch of raw rewards (N, F), over all processes, change the statistics."""
        columns = [column[~column.isnan()] for column in rewards.double().unbind(1)]
        if not self.center:
            self.center, self.spread = [None] * len(columns), [0.0] * len(columns)
        for component, scores in enumerate(columns):
            if len(scores):
                self._update_component(component, scores)

    def _update_component(self, component: int, scores: Tensor) -> None:
        raise NotImplementedError

    def scale(self, rewards: Tensor) -> Tensor:
        """Raw rewards (N, F) in units of the statistics, clipped; NaN stays NaN."""
        center = torch.tensor([center or 0.0 for center in self.center], dtype=rewards.dtype, device=rewards.device)
        spread = torch.tensor(self.spread, dtype=rewards.dtype, device=rewards.device)
        return apply_dynamic_scaling(rewards, center, spread, self.clip, self.min_scale)

    def of_floats(self, scores: Sequence[float | None]) -> list[float | None]:
        """One batch of one component as plain numbers: the statistics follow, then the batch is scaled."""
        column = torch.tensor([[torch.nan if score is None else score] for score in scores], dtype=torch.float64)
        finite = column.masked_fill(~column.isfinite(), torch.nan)  # a fault stays visible but moves no statistics
        self.update(finite)
        scaled = self.scale(column).squeeze(1).tolist()
        return [None if score is None else value for score, value in zip(scores, scaled)]

    def state_dict(self) -> dict[str, Any]:
        """Center and spread of each component."""
        return {"center": list(self.center), "spread": list(self.spread)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved statistics."""
        self.center, self.spread = list(state["center"]), list(state["spread"])


class RobustScaler(_Scaler):
    """Exponential averages of `robust_statistics`, started anew when the scale of the rewards jumps.

    center and scale move to decay x old + (1 - decay) x batch; a batch whose scale is beyond a factor 3 of the average
    replaces both.

    Args: clip > 0, in scales; min_scale >= 0, in units of the scores; decay in [0, 1).

    >>> scaler = RobustScaler(clip=3.0, decay=0.9)
    >>> scaler.update(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]))
    >>> scaler.scale(torch.tensor([[2.0], [1e6]]))
    tensor([[0.],
            [3.]])
    """

    def __init__(self, clip: float = 3.0, min_scale: float = 0.0, decay: float = 0.9) -> None:
        super().__init__(clip, min_scale)
        self.decay = decay

    def _update_component(self, component: int, scores: Tensor) -> None:
        average, average_spread = self.center[component], self.spread[component]
        center, spread = robust_statistics(scores, None if average is None else average_spread)
        if average is not None and _comparable(spread, average_spread):
            center = self.decay * average + (1 - self.decay) * center
            spread = self.decay * average_spread + (1 - self.decay) * spread
        self.center[component], self.spread[component] = center, spread


class RunningScaler(_Scaler):
    """Mean and standard deviation of all scores of the run. One outlier widens the scale for long: see `RobustScaler`.

    >>> scaler = RunningScaler(clip=3.0)
    >>> scaler.update(torch.tensor([[0.0], [2.0]]))
    >>> scaler.update(torch.tensor([[4.0], [6.0]]))
    >>> scaler.center, scaler.spread
    ([3.0], [2.23606797749979])
    """

    def __init__(self, clip: float = 3.0, min_scale: float = 0.0) -> None:
        super().__init__(clip, min_scale)
        self.count: list[float] = []

    def _update_component(self, component: int, scores: Tensor) -> None:
        self.count += [0.0] * (len(self.center) - len(self.count))
        old, new = self.count[component], float(len(scores))
        mean, old_mean = float(scores.mean()), self.center[component] or 0.0
        total = old + new
        squares = old * self.spread[component] ** 2 + float((scores - mean).square().sum())
        squares += (mean - old_mean) ** 2 * old * new / total  # Chan, Golub and LeVeque 1979
        self.count[component] = total
        self.center[component] = old_mean + (mean - old_mean) * new / total
        self.spread[component] = (squares / total) ** 0.5

    def state_dict(self) -> dict[str, Any]:
        """Center, spread and how many scores they stand for."""
        return {**super().state_dict(), "count": list(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved statistics."""
        super().load_state_dict(state)
        self.count = list(state["count"])


class BatchScaler(_Scaler):
    """Mean and standard deviation of the last batch alone.

    >>> scaler = BatchScaler(clip=3.0)
    >>> scaler.update(torch.tensor([[0.0], [4.0]]))
    >>> scaler.scale(torch.tensor([[0.0], [4.0]]))
    tensor([[-1.],
            [ 1.]])
    """

    def _update_component(self, component: int, scores: Tensor) -> None:
        self.center[component] = float(scores.mean())
        self.spread[component] = float(scores.std(correction=0))


REWARD_SCALERS: dict[str, Callable[..., _Scaler]] = {
    "robust": RobustScaler,
    "running": RunningScaler,
    "batch": BatchScaler,
}


class AverageMoments:
    """Exponential average of the mean and variance of a stream of batches, for whitening that does not follow each one.

    Args: decay in [0, 1).

    >>> average = AverageMoments(decay=0.5)
    >>> average.update(torch.tensor([4.0, 0.0, 12.0], dtype=torch.float64))  # variance 12 / 3
    tensor([ 4.,  0., 12.], dtype=torch.float64)
    >>> average.update(torch.tensor([4.0, 2.0, 0.0], dtype=torch.float64))
    tensor([4., 1., 6.], dtype=torch.float64)
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.mean: float | None = None
        self.variance = 0.0

    def update(self, moments: Tensor) -> Tensor:
        """Let a batch's moments (3,) from `masking.masked_moments` change the average; returns the average in their
        form, with the batch's count."""
        count, mean, deviations = moments.unbind()
        freedom = (count - 1).clamp(min=1)
        if count > 0:
            keep = 0.0 if self.mean is None else self.decay
            self.mean = keep * (self.mean or 0.0) + (1 - keep) * float(mean)
            self.variance = keep * self.variance + (1 - keep) * float(deviations / freedom)
        return torch.stack([count, torch.full_like(mean, self.mean or 0.0), self.variance * freedom])

    def state_dict(self) -> dict[str, Any]:
        """Mean and variance."""
        return {"mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved moments."""
        self.mean, self.variance = state["mean"], state["variance"]
