"""What flows between the stages, and the seams where another implementation plugs in.

Sizes: B completions on this process, P prompt tokens, C completion tokens. Masks are boolean and True means "counts";
they come from positions, never from token ids. Floats are fp32. Padding positions of float tensors hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Completions sampled by the policy, before anything is known about them."""

    index: int  # which rollout of the run, from 0
    prompt_ids: Tensor  # (B, P) long, padded on the left
    prompt_mask: Tensor  # (B, P) bool
    completion_ids: Tensor  # (B, C) long, padded on the right
    completion_mask: Tensor  # (B, C) bool, the stop token included
    finished: Tensor  # (B,) bool, ended by a stop token
    examples: list[dict[str, Any]]  # B dataset rows, as the dataset gave them

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


@dataclass(frozen=True)
class Advantages:
    """All that the optimizer steps of one rollout read."""

    scored: Scored
    mask: Tensor  # (B, C) bool, completion_mask without the rows that are not valid
    token_rewards: Tensor  # (B, C)
    advantages: Tensor  # (B, C) whitened over all processes
    returns: Tensor  # (B, C) value targets


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

    def score(self, chunk: TokenChunk, temperature: float) -> tuple[TokenStats, Tensor]:
        """The policy's statistics and the reference's log-probs (R, C') in one call, without gradients."""
        ...


class Controller(Protocol):
    """A small state machine whose state of plain numbers and tensors travels in the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
