"""What the training loop iterates over: one item is one mini-batch is one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..rollout.prompts import seeded_generator


class RolloutLoader:
    """Yields the mini-batches of rollout after rollout, collecting a new one when the last is used up.

    Where it starts follows from the step counter alone, so a resumed run continues in the middle of a rollout. One
    iteration ends with a pass over the dataset, for transformers' idea of an epoch.
    """

    def __init__(
        self, dataset: Any, batch_size: int, steps_per_rollout: int, max_steps: int, step: Callable, item: Callable
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._steps_per_epoch = math.ceil(len(dataset) / batch_size) * steps_per_rollout
        self._max_steps = max_steps
        self._step = step
        self._item = item

    def __len__(self) -> int:
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self._step()
        end = start + self._steps_per_epoch - start % self._steps_per_epoch
        for step in range(start, min(end, self._max_steps)):  # none when a finished run is resumed
            yield self._item(step)


class PromptLoader:
    """This process's share of an evaluation set in batches of rows. A process may have none."""

    def __init__(self, dataset: Any, batch_size: int, process: int, num_processes: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._rows = range(process, len(dataset), num_processes)

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self.batch_size)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for start in range(0, len(self._rows), self.batch_size):
            yield take_rows(self.dataset, self._rows[start : start + self.batch_size])


def take_rows(dataset: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a map-style dataset as dicts."""
    return [dict(dataset[int(row)]) for row in rows]


def mini_batches(
    local_batch_size: int, num_mini_batches: int, epochs: int, seed: Sequence[int], extra_rows: int = 0
) -> list[list[list[int]]]:
    """Row indices of every mini-batch of a rollout: epochs x mini-batches x rows, each epoch a fresh permutation.

    `extra_rows` more rows after those of the rollout, the replayed ones, are dealt out evenly: they enlarge the
    mini-batches and leave the others where they were.
    """
    size = local_batch_size // num_mini_batches
    plans = []
    for epoch in range(epochs):
        generator = seeded_generator(*seed, epoch)
        order = torch.randperm(local_batch_size, generator=generator).tolist()
        extra = (local_batch_size + torch.randperm(extra_rows, generator=generator)).tolist()
        batches = [order[start : start + size] for start in range(0, local_batch_size, size)]
        plans.append([rows + extra[number::num_mini_batches] for number, rows in enumerate(batches)])
    return plans
