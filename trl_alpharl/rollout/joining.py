"""Two sets of completions as one rollout."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..records import Rollout


def join_rollouts(first: Rollout, second: Rollout, pad_id: int) -> Rollout:
    """The rows of `second` after those of `first`, in one padding.

    Raises ValueError when the result could not say whose rewards are known (those of its last rows), or which rows are
    replayed (its last ones): `first` may hold such rows only where all of `second`'s are such too.
    """
    rows = len(second.completion_ids)
    known_after = 0 if second.known_rewards is None else len(second.known_rewards)
    if (first.known_rewards is not None and known_after < rows) or (first.replayed and second.replayed < rows):
        raise ValueError("join_rollouts: rows that are known or replayed must come last")
    deep = max(first.prompt_ids.shape[1], second.prompt_ids.shape[1])
    wide = max(first.completion_ids.shape[1], second.completion_ids.shape[1])

    def left(name: str, value: int) -> Tensor:
        parts = (getattr(first, name), getattr(second, name))
        return torch.cat([F.pad(part, (deep - part.shape[1], 0), value=value) for part in parts])

    def right(first_part: Tensor, second_part: Tensor, value: int) -> Tensor:
        return torch.cat([F.pad(part, (0, wide - part.shape[1]), value=value) for part in (first_part, second_part)])

    logps = None
    if first.behavior_logps is not None or second.behavior_logps is not None:
        logps = right(_behavior(first), _behavior(second), 0)
    known = [part.known_rewards for part in (first, second) if part.known_rewards is not None]
    sources = [part.dataset_rows for part in (first, second) if part.dataset_rows is not None]
    return replace(
        first,
        prompt_ids=left("prompt_ids", pad_id),
        prompt_mask=left("prompt_mask", 0),
        completion_ids=right(first.completion_ids, second.completion_ids, pad_id),
        completion_mask=right(first.completion_mask, second.completion_mask, 0),
        finished=torch.cat([first.finished, second.finished]),
        examples=[*first.examples, *second.examples],
        replayed=first.replayed + second.replayed,
        dataset_rows=torch.cat(sources) if sources else None,
        behavior_logps=logps,
        known_rewards=torch.cat(known) if known else None,
    )


def _behavior(rollout: Rollout) -> Tensor:
    if rollout.behavior_logps is not None:
        return rollout.behavior_logps
    return torch.full(
        rollout.completion_ids.shape, torch.nan, dtype=torch.float32, device=rollout.completion_ids.device
    )
