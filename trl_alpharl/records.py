"""What flows between the stages, and the seams where another implementation plugs in.

Sizes: B completions on this process, P prompt tokens, C completion tokens. Masks are boolean and True means "counts";
they come from positions, never from token ids. Floats are fp32. Padding positions of float tensors hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Completions sampled by the policy, before anything is known about them.

    The last `replayed` rows come from earlier rollouts. They enlarge the mini-batches; whatever is averaged over a
    rollout (metrics, controllers) reads the fresh rows before them.
    """

    index: int  # which rollout of the run, from 0
    prompt_ids: Tensor  # (B, P) long, padded on the left
    prompt_mask: Tensor  # (B, P) bool
    completion_ids: Tensor  # (B, C) long, padded on the right
    completion_mask: Tensor  # (B, C) bool, the stop token included
    finished: Tensor  # (B,) bool, ended by a stop token
    examples: list[dict[str, Any]]  # the dataset rows of the fresh rows, as the dataset gave them
    replayed: int = 0  # rows
    dataset_rows: Tensor | None = None  # (fresh rows,) long, which rows of the dataset; None: nobody asked
    behavior_logps: Tensor | None = None  # (B, C) nats, of the policy that sampled; NaN: the one that is being trained
    known_rewards: Tensor | None = None  # (K, F) fp64, of the last K rows, as `Scored.rewards`: asked for before

    @property
    def fresh(self) -> int:
        """Rows that were sampled for this rollout."""
        return len(self.completion_ids) - self.replayed

    def head(self, rows: int) -> Rollout:
        """The first `rows` rows; the rollout itself when these are all."""
        if rows == len(self.completion_ids):
            return self
        per_row = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "finished", "behavior_logps")
        cut: dict[str, Any] = {name: _cut(getattr(self, name), rows) for name in per_row}
        sources = _cut(self.dataset_rows, rows)
        examples = self.examples[:rows]
        return replace(self, **cut, dataset_rows=sources, examples=examples, replayed=0, known_rewards=None)

    def lengths(self) -> tuple[list[int], list[int]]:
        """Prompt and completion lengths in tokens, B each."""
        return self.prompt_mask.sum(1).tolist(), self.completion_mask.sum(1).tolist()


@dataclass(frozen=True)
class Scored:
    """A rollout with what the roles say about it: one no-gradient pass plus the rewards."""

    rollout: Rollout
    old_per_token_logps: Tensor  # (B, C) nats, at the sampling temperature
    ref_per_token_logps: Tensor  # (B, C) nats
    values: Tensor  # (B, C) value before each completion token
    entropies: Tensor  # (B, C) nats, of the policy's next-token distribution
    scores: Tensor  # (B,) one number a completion, penalties included; 0 where not valid
    valid: Tensor  # (B,) bool, False where every reward function returned None: the row trains nothing
    finite: bool  # False when a reward or a log-prob was NaN or infinite on any process: the updates are skipped
    cause: str = ""  # what was not finite
    rewards: Tensor | None = None  # (B, F) fp64, what each reward function said, unweighted; NaN = no opinion

    def head(self, rows: int) -> Scored:
        """The first `rows` rows; the record itself when these are all."""
        return _head(self, rows, rollout=self.rollout.head(rows))


@dataclass(frozen=True)
class Advantages:
    """All that the optimizer steps of one rollout read."""

    scored: Scored
    mask: Tensor  # (B, C) bool, completion_mask without the rows that are not valid
    token_rewards: Tensor  # (B, C)
    advantages: Tensor  # (B, C) whitened over all processes
    returns: Tensor  # (B, C) value targets

    def head(self, rows: int) -> Advantages:
        """The first `rows` rows; the record itself when these are all."""
        return _head(self, rows, scored=self.scored.head(rows))


@dataclass(frozen=True)
class TokenChunk:
    """R rows of one padded width W, prompt and completion contiguous, padded on the right (at least one column)."""

    rows: list[int]  # which rows of the rollout; shorter than R when filler rows complete the shape
    input_ids: Tensor  # (R, W) long
    attention_mask: Tensor  # (R, W) long, 1 = attend
    position_ids: Tensor  # (R, W) long
    predict_at: Tensor  # (R, C') long, the position whose hidden state predicts each completion token
    completion_ids: Tensor  # (R, C') long
    completion_mask: Tensor  # (R, C') bool, all False on filler rows
    frozen_hidden: Tensor | None = None  # (R, W, H) what the frozen layers give; None: not kept


class TokenStats(NamedTuple):
    """What the actor-critic says about the completion tokens of a chunk; (R, C') each, fp32, padding not masked."""

    per_token_logps: Tensor | None  # nats, at the sampling temperature; None when only values were asked for
    entropies: Tensor | None  # nats
    values: Tensor | None


class Rewards(Protocol):
    """Scores texts. TRL's reward-function signature; `None` for a row means "no opinion"."""

    def __call__(
        self, *, prompts: list, completions: list, completion_ids: list[list[int]], **columns: Any
    ) -> list[float | None]: ...


class RolloutCollector(Protocol):
    """The seam for another collector (an asynchronous one, say): prompts in, completions out."""

    def __call__(self, examples: list[dict[str, Any]], index: int) -> Rollout: ...


class Roles(Protocol):
    """What the scoring pass needs of the actor-critic."""

    def frozen_hidden(self, chunk: TokenChunk) -> Tensor | None:
        """What the layers that never change give for a chunk, (R, W, H); None when there are none to be kept."""
        ...

    def score(self, chunk: TokenChunk, temperature: float) -> tuple[TokenStats, Tensor]:
        """The policy's statistics and the reference's log-probs (R, C') in one call, without gradients."""
        ...


class Controller(Protocol):
    """A small state machine whose state of plain numbers and tensors travels in the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _cut(tensor: Tensor | None, rows: int) -> Tensor | None:
    return None if tensor is None else tensor[:rows]


def _head(record: Any, rows: int, **inner: Any) -> Any:
    """The first rows of a record all of whose tensors have one entry a row."""
    if all(part is getattr(record, name) for name, part in inner.items()):
        return record
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **inner, **{name: v[:rows] for name, v in values.items() if isinstance(v, Tensor)})


__all__ = [
    "Advantages",
    "Controller",
    "Rewards",
    "Roles",
    "Rollout",
    "RolloutCollector",
    "Scored",
    "TokenChunk",
    "TokenStats",
]
