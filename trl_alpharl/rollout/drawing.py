"""What `generate` is given to draw a token by, and to stop at."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

_BLOCK = 256  # words


class HalfEnded(StoppingCriteria):
    """Ends a `generate` once at least half of its rows have ended; `ended` (rows,) says which."""

    def __init__(self, stop_ids: Tensor) -> None:
        self.stop_ids = stop_ids
        self.ended = torch.zeros((), dtype=torch.bool, device=stop_ids.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ended = self.ended | torch.isin(input_ids[:, -1], self.stop_ids)
        return (2 * self.ended.sum() >= len(self.ended)).expand(len(self.ended))


class TokenDraw(LogitsProcessor):
    """Draws the next token from softmax(logits / temperature) and gives it the greatest score, for a `generate` that
    takes the greatest. One uniform number a row decides, where `multinomial` draws one for every word.

    `rows` (R,): which of the rows at the start these are; the numbers of all are drawn. They may become fewer.
    """

    def __init__(self, temperature: float, rows: Tensor) -> None:
        self.temperature, self.rows = temperature, rows
        self.count = len(rows)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (rows, V): 1 for the token that was drawn, 0 for all others."""
        rows, vocabulary = scores.shape
        # Two stages: running sums of the whole vocabulary in fp64 take longer than all of a small model's layers.
        likely = F.pad(torch.softmax(scores / self.temperature, -1, dtype=torch.float32), (0, -vocabulary % _BLOCK))
        blocks = likely.view(rows, -1, _BLOCK)
        upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
        at = torch.rand(self.count, 1, dtype=torch.float64, device=scores.device)[self.rows] * upto[:, -1:]
        block = _first_above(upto, at)
        before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
        within = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1).double().cumsum(-1)
        token = (block * _BLOCK + _first_above(within, at - before)).clamp_(max=vocabulary - 1)  # NaN: some token
        return torch.zeros_like(scores).scatter_(1, token, 1.0)


def _first_above(upto: Tensor, at: Tensor) -> Tensor:
    """The first place (rows, 1) whose running sum (rows, places) is above `at` (rows, 1), which is never one that adds
    nothing; for an `at` that rounding took to the end, the last such place."""
    place = torch.searchsorted(upto, torch.minimum(at, upto[:, -1:] * (1 - 2**-52)), right=True)
    return place.clamp_(max=upto.shape[1] - 1)  # past the end: NaN
