"""A reward function in units of its own spread, for any trainer that takes TRL's reward functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .runner import RewardRunner, reward_name


class RobustScaled:
    """A reward function scaled by averaged median and IQR: outliers are clipped and a drifting scale is followed.

    Itself a reward function, for `GRPOTrainer` as for ours. The statistics are those of the batches that it is called
    with, on each process its own; an evaluation's batches count too. Several rewards: wrap each, then add them up with
    `Combined` or `reward_weights`. Under `ARPOTrainer` set `reward_scaling: robust` instead, which knows all processes,
    resumes exactly and leaves evaluations alone.

    `reward`: the function, sync or async; its None stays None. `decay`: weight of the past in the averages. `clip`: the
    largest scaled reward. `min_scale`: the smallest scale, in units of the reward; 1 for rewards of 0 and 1.
    """

    def __init__(
        self, reward: Callable[..., Any], decay: float = 0.9, clip: float = 3.0, min_scale: float = 0.0
    ) -> None:
        from ..functional.scaling import RobustScaler  # torch: not before a reward is made

        self.scaler = RobustScaler(clip, min_scale, decay)
        self.runner = RewardRunner([reward])
        self.__name__ = f"scaled_{reward_name(reward)}"

    def __call__(
        self, prompts: list, completions: list, completion_ids: list[list[int]] | None = None, **columns: Any
    ) -> list[float | None]:
        """One number a completion, or None. A NaN stays one and moves no statistics."""
        table = self.runner(prompts, completions, completion_ids, columns)
        values = [row[0] if given[0] else None for row, given in zip(table.values, table.given)]
        return self.scaler.of_floats(values)

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain numbers."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved statistics."""
        self.scaler.load_state_dict(state)


__all__ = ["RobustScaled"]
