"""Rows of a rollout as chunks of fixed shapes, and the scoring pass over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..records import Roles, Rollout, TokenChunk, TokenStats
from ..shapes import group_rows, plan_widths


@dataclass(frozen=True)
class ChunkPlan:
    """The padded widths of a rollout's rows, fixed for all its passes.

    In bf16 a row's result depends on the shape it is computed in (mean |ratio - 1| of .04 was measured between two
    shapes, 0 in one). So scoring and every training step run a row in one shape: `rows` x its width, its completion in
    `completion_widths[row]` columns.
    """

    rows: int
    lengths: list[int]  # prompt + completion tokens of each row
    widths: list[int]
    completion_widths: list[int]
    kept: dict[int, Tensor] = field(default_factory=dict)  # row -> (width, H), what the frozen layers gave for it

    def chunks(self, rollout: Rollout, indices: Sequence[int]) -> Iterator[TokenChunk]:
        """The chunks of some rows, rows sorted by length, filler rows completing the last chunk of each width."""
        for width, rows in group_rows(list(indices), self.widths, self.lengths, self.rows):
            yield build_chunk(rollout, rows, self.rows, width, self.completion_widths[rows[0]])

    def with_frozen(self, chunk: TokenChunk, roles: Roles) -> TokenChunk:
        """The chunk with what the frozen layers give; they run when one of its rows first comes by."""
        if any(row not in self.kept for row in chunk.rows):
            hidden = roles.frozen_hidden(chunk)
            if hidden is None:
                return chunk
            self.kept.update(zip(chunk.rows, hidden))
        filled = chunk.rows + chunk.rows[:1] * (len(chunk.input_ids) - len(chunk.rows))
        return replace(chunk, frozen_hidden=torch.stack([self.kept[row] for row in filled]))


FEW_WIDTHS = 3  # where each costs a compilation


def plan_chunks(
    rollout: Rollout, mini_batches: list[list[list[int]]], rows: int, few_widths: bool = False
) -> ChunkPlan:
    """Choose the widths of a rollout for the mini-batches it will be trained in (epochs x mini-batches x rows)."""
    prompts, completions = rollout.lengths()
    lengths = [prompt + completion for prompt, completion in zip(prompts, completions)]
    most = {"max_classes": FEW_WIDTHS} if few_widths else {}
    widths = plan_widths(lengths, mini_batches, rows, **most)
    longest: dict[int, int] = {}
    for width, completion in zip(widths, completions):
        longest[width] = max(longest.get(width, 1), completion)
    return ChunkPlan(rows, lengths, widths, [longest[width] for width in widths])


def build_chunk(rollout: Rollout, rows: list[int], num_rows: int, width: int, completion_width: int) -> TokenChunk:
    """Rows of a rollout as one chunk; filler rows repeat the first and have an empty completion mask."""
    device = rollout.completion_ids.device
    index = torch.tensor(rows + rows[:1] * (num_rows - len(rows)), device=device)
    prompt_mask, completion_mask = rollout.prompt_mask[index], rollout.completion_mask[index]
    attend = torch.cat([prompt_mask, completion_mask], 1)
    tokens = torch.cat([rollout.prompt_ids[index], rollout.completion_ids[index]], 1)
    # Stable sort on "does not count" moves padding to the right and keeps the order of the tokens.
    order = (~attend).long().argsort(dim=1, stable=True)
    tokens, attend = (_fit(x.gather(1, order), width) for x in (tokens, attend.long()))
    tokens = tokens * attend  # id 0 where padded: any valid id, it is masked
    # The last column is always padding; its position must not reach past a model's learned positions.
    positions = torch.arange(width, device=device).clamp(max=max(width - 2, 0)).expand(num_rows, width)
    columns = torch.arange(completion_width, device=device)
    predict_at = (prompt_mask.sum(1, keepdim=True) - 1 + columns).clamp(max=width - 1)
    mask = _fit(completion_mask, completion_width).clone()
    mask[len(rows) :] = False
    return TokenChunk(
        rows=rows,
        input_ids=tokens,
        attention_mask=attend,
        position_ids=positions,
        predict_at=predict_at,
        completion_ids=_fit(rollout.completion_ids[index], completion_width),
        completion_mask=mask,
    )


def _fit(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)) if missing > 0 else x[:, :width]


def gather_rows(chunk: TokenChunk, per_token: Tensor) -> Tensor:
    """Rows of a rollout-wide tensor (B, C) in a chunk's shape (R, C'); filler rows hold 0."""
    width = chunk.completion_ids.shape[1]
    fitted = _fit(per_token[torch.tensor(chunk.rows, device=per_token.device)], width)
    return torch.nn.functional.pad(fitted, (0, 0, 0, chunk.completion_ids.shape[0] - len(chunk.rows)))


def score_rollout(roles: Roles, rollout: Rollout, plan: ChunkPlan, temperature: float) -> tuple[TokenStats, Tensor]:
    """Old log-probs, entropies, values and reference log-probs of a whole rollout, (B, C) each, 0 at padding."""
    shape = rollout.completion_ids.shape
    device = rollout.completion_ids.device
    outputs = [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(4)]
    for chunk in plan.chunks(rollout, range(shape[0])):
        chunk = plan.with_frozen(chunk, roles)
        stats, reference = roles.score(chunk, temperature)
        real = len(chunk.rows)
        index = torch.tensor(chunk.rows, device=device)
        for output, part in zip(outputs, (stats.per_token_logps, stats.entropies, stats.values, reference)):
            kept = part.masked_fill(~chunk.completion_mask, 0.0)[:real]
            output[index, : kept.shape[1]] = kept.to(output.dtype)
    logps, entropies, values, reference = outputs
    return TokenStats(logps, entropies, values), reference
