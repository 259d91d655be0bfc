"""Log-probs and entropies of the next-token distribution, a few rows of logits at a time.

Logits of a whole batch are the largest tensor of a naive PPO step (rows x tokens x vocabulary). Here they exist for one
chunk only, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..shapes import equal_chunk_rows

# exp() of this is exactly 0 in fp32 and in fp64: raising smaller log-probs, -inf above all, to it changes no product
# with their probability and keeps 0 * -inf from making NaN.
_LOG_OF_ZERO = -1e3

ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


class _LogpsAndEntropy(torch.autograd.Function):
    """Two (N, V) temporaries in each direction, one of them kept in between."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(logits, dim=-1)
        logps = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        log_probs.clamp_(min=_LOG_OF_ZERO)
        entropies = log_probs.exp().mul_(log_probs).sum(-1).neg_()
        ctx.save_for_backward(log_probs, labels, entropies)
        ctx.set_materialize_grads(False)  # a loss without an entropy term then skips half of the backward
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, None]:
        # d logp_y / d z_j = [j = y] - p_j  and  d H / d z_j = -p_j (log p_j + H)
        log_probs, labels, entropies = ctx.saved_tensors
        if grad_logps is None and grad_entropies is None:
            return None, None
        grad_logits = log_probs.exp().neg_()
        if grad_entropies is not None:
            slope = log_probs + entropies.unsqueeze(-1)
            slope.mul_(grad_entropies.unsqueeze(-1))
            if grad_logps is not None:
                slope.add_(grad_logps.unsqueeze(-1))
            grad_logits.mul_(slope)
        elif grad_logps is not None:
            grad_logits.mul_(grad_logps.unsqueeze(-1))
        if grad_logps is not None:
            grad_logits.scatter_add_(-1, labels.unsqueeze(-1), grad_logps.unsqueeze(-1))
        return grad_logits, None


def logps_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each row's distribution, both differentiable once.

    logp = z_y - log sum exp z and H = -sum p log p, with 0 log 0 = 0, so logits of -inf (forbidden tokens) are fine.

    Args: logits (N, V), any float dtype, labels (N,) long in [0, V); rows of padding need some label too.
    Returns: logps (N,) and entropies (N,) in nats, fp32 (fp64 for fp64 logits); entropies >= 0. Nothing is masked.

    >>> logps, entropies = logps_and_entropy(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    >>> logps, entropies
    (tensor([-0.6931]), tensor([0.6931]))
    """
    return _LogpsAndEntropy.apply(_at_least_fp32(logits), labels)


def chunked_logps_and_entropy(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    max_chunk_elements: int = 1 << 24,
    context_fn: ContextFn | None = None,
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """`logps_and_entropy(head(hidden) / temperature, labels)` with the logits of one chunk alive at a time.

    With gradients each chunk is recomputed in the backward. All chunks of a call have the same number of rows (filler
    rows complete the last): a bf16 matrix product then rounds a row in the same way whichever chunk it falls into, and
    two calls with equal N, V and max_chunk_elements agree bit for bit.

    Args: hidden (N, H), the states that predict the labels; labels (N,) long in [0, V); head, (n, H) -> (n, V) logits,
        without randomness; temperature > 0; max_chunk_elements, the most elements of a chunk's logits (one row at
        least); context_fn, what `torch.utils.checkpoint` enters around the forward and around the recompute (the role
        switch); vocab_size, V.
    Returns: logps (N,) and entropies (N,) in nats, fp32 or fp64. Nothing is masked.

    >>> head = torch.nn.Linear(2, 3, bias=False)
    >>> _ = torch.nn.init.zeros_(head.weight)
    >>> hidden, labels = torch.ones(5, 2), torch.zeros(5, dtype=torch.long)
    >>> logps, entropies = chunked_logps_and_entropy(hidden, labels, head, 0.7, max_chunk_elements=6, vocab_size=3)
    >>> logps.detach()
    tensor([-1.0986, -1.0986, -1.0986, -1.0986, -1.0986])
    """

    def one_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return logps_and_entropy(_at_least_fp32(head(states)) / temperature, targets)

    total = hidden.shape[0]
    rows = equal_chunk_rows(total, max(1, max_chunk_elements // vocab_size))
    chunks = []
    for states, targets in zip(hidden.split(rows), labels.split(rows), strict=True):
        filler = rows - states.shape[0]
        if filler:
            states, targets = F.pad(states, (0, 0, 0, filler)), F.pad(targets, (0, filler))
        if torch.is_grad_enabled():
            chunk = checkpoint(
                one_chunk,
                states,
                targets,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=context_fn or noop_context_fn,
            )
        else:
            chunk = one_chunk(states, targets)
        chunks.append(chunk)
    logps, entropies = zip(*chunks, strict=True)
    return torch.cat(logps)[:total], torch.cat(entropies)[:total]


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
