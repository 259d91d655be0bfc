"""Which prompts a rollout takes when some are too easy and some too hard to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..functional.curriculum import draw_rows, intermediate, success_weights, updated_success
from .prompts import seeded_generator


class PromptCurriculum:
    """A success rate for every prompt of the dataset, and draws toward a target rate.

    A prompt that was never tried counts as being at the target: it is drawn as often as the best ones.
    Weights are those of `functional.curriculum.success_weights`.
    """

    def __init__(self, num_rows: int, target: float, width: float) -> None:
        self.target, self.width = target, width
        self.success = torch.full((num_rows,), target, dtype=torch.float64)
        self.tries = torch.zeros(num_rows, dtype=torch.long)

    def rows(self, count: int, index: int, seed: int) -> list[int]:
        """Dataset rows for rollout `index`, over all processes; the same as long as nothing was recorded in between."""
        weights = success_weights(self.success, self.target, self.width)
        return draw_rows(weights, count, seeded_generator(seed, index, 4))

    def record(self, rows: Sequence[int], outcomes: Sequence[float]) -> None:
        """Let outcomes in [0, 1], of all processes, change the rates of their prompts."""
        for row, outcome in zip(rows, outcomes):
            self.success[row] = updated_success(float(self.success[row]), int(self.tries[row]), outcome)
            self.tries[row] += 1

    def tensors(self) -> dict[str, Tensor]:
        """The state, for a safetensors file."""
        return {"success": self.success, "tries": self.tries}

    def load_tensors(self, saved: dict[str, Tensor]) -> None:
        """Go on with what `tensors` wrote. Raises ValueError when it is about another number of prompts."""
        if len(saved["success"]) != len(self.success):
            raise ValueError(
                f"train_dataset has {len(self.success)} rows; the run that saved its curriculum had "
                f"{len(saved['success'])}."
            )
        self.success, self.tries = saved["success"], saved["tries"]


def screening_groups(rows: Sequence[int], completions: int) -> list[int]:
    """Each of the rows `completions` times, one after the other: the second half of a screened rollout may be given to
    other prompts."""
    return [row for row in rows for _ in range(completions)]


def screened_places(outcomes: Tensor, count: int) -> list[int]:
    """Which of the screened prompts get the `count` completions that are left: in turn, those that some but not all of
    their first completions solved (SPEED-RL, arXiv 2506.09016); all of them when there is none such.

    Args: outcomes (N, k) bool, k first completions of each of N prompts.
    """
    passing = intermediate(outcomes).nonzero().squeeze(1).tolist() or list(range(len(outcomes)))
    return [passing[turn % len(passing)] for turn in range(count)]
