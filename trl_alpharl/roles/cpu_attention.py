"""Attention for short rows in half precision on a CPU, where torch's own kernel is several times slower than matrix
products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "sdpa_short_rows"
LONGEST = 256  # tokens a row; torch's kernel catches up with longer ones
_CHANGES_SCORES = ("softcap", "position_bias", "s_aux")


def use_cpu_attention(model: PreTrainedModel) -> None:
    """Take this attention in a model that would use torch's; it passes on to torch's what it does not do."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def short_rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, H, T, D), key and value (B, K, S, D), K a divisor of H; returns
    (B, T, H, D)."""
    longest = max(query.shape[2], key.shape[2])
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.device.type == "cpu" and longest <= LONGEST
    masked = attention_mask is not None or query.shape[2] == 1
    if not fits or not masked or dropout or any(kwargs.get(name) is not None for name in _CHANGES_SCORES):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attention.apply(query, key, value, attention_mask, scaling).transpose(1, 2), None


class _Attention(torch.autograd.Function):
    """The query heads of one key head are rows of one product. Probabilities are made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        rows = (query * scaling).reshape(len(key), key.shape[1], -1, key.shape[-1])
        if mask is not None and mask.dtype == torch.bool:
            # Half of the range: a score below 0 must not take it to -inf, which a row of padding would turn into NaN.
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min / 2)
        output = _probabilities(rows, key, mask, query.shape) @ value
        ctx.save_for_backward(rows, key, value, mask)
        ctx.shape, ctx.scaling = query.shape, scaling
        return output.view(*query.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, key, value, mask = ctx.saved_tensors
        weights = _probabilities(rows, key, mask, ctx.shape)
        gradient = gradient.reshape(*rows.shape[:-1], -1)
        by_value = weights.mT @ gradient
        by_scores = torch._softmax_backward_data(gradient @ value.mT, weights, -1, weights.dtype)
        by_query = (by_scores @ key).mul_(ctx.scaling).view(ctx.shape)
        return by_query, by_scores.mT @ rows, by_value, None, None


def _probabilities(rows: Tensor, key: Tensor, mask: Tensor | None, shape: torch.Size) -> Tensor:
    """(B, K, H / K * T, S)."""
    scores = rows @ key.mT
    if mask is not None:
        grouped = scores.view(len(key), key.shape[1], -1, shape[2], key.shape[2])
        grouped.add_(mask.unsqueeze(1))  # the mask is (B or 1, 1, T, S)
    return torch.softmax(scores, -1)


AttentionInterface.register(NAME, short_rows_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
