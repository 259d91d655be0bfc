"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .runner import RewardRunner


class Combined:
    """A reward function that is the weighted sum of several; itself usable wherever a reward function is.

    A part that returns None for a row is left out of that row's sum; a row without any opinion is None. A part's NaN
    stays NaN, so that the trainer sees the fault. `weights`: one a function, None means 1 each.
    """

    def __init__(self, reward_funcs: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.runner = RewardRunner(reward_funcs, weights)

    def __call__(
        self, prompts: list, completions: list, completion_ids: list[list[int]] | None = None, **columns: Any
    ) -> list[float | None]:
        """One number a completion, or None."""
        table = self.runner(prompts, completions, completion_ids, columns)
        return [_total(values, given, self.runner.weights) for values, given in zip(table.values, table.given)]


def _total(values: list[float], given: list[bool], weights: list[float]) -> float | None:
    if not any(given):
        return None
    return sum(weight * value for weight, value, has in zip(weights, values, given) if has)


__all__ = ["Combined"]
