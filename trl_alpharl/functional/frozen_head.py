"""Log-probs and entropies through a linear head that does not learn, a block of the vocabulary at a time.

Neither logits nor their gradients exist for more than one block: the softmax is summed up as the blocks go by. A row's
log-prob depends on its own hidden state alone, so the slope of one by the other is gathered in the same sweep and the
backward pass is a product of two numbers a row. That is two matrix products where recomputing logits takes three.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..shapes import equal_chunk_rows

_LOG_OF_ZERO = -1e3  # exp() of it is 0; keeps 0 * -inf from making NaN where a logit is -inf
_BELOW_ALL = -1e30
_MOST_ROWS = {"cpu": 1024}  # of one sweep: a block of logits should fit a core's cache, or fill a GPU
_BLOCK_ELEMENTS = {"cpu": 1 << 20}
_ON_A_GPU = (4096, 1 << 26)


class LinearHead(NamedTuple):
    """A head that gives logits h W^T + b, then `scale` times that, then `cap` tanh(. / cap)."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    cap: float | None = None


def frozen_head_logps_and_entropy(
    hidden: Tensor,
    labels: Tensor,
    head: LinearHead,
    temperature: float,
    entropy_grad: bool = True,
    max_block_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`logps_and_entropy(head(hidden) / temperature, labels)` without logits, for a head without gradients.

    Products with the weights that give logits are in fp32 whatever the dtypes; those that give slopes are in the dtype
    of hidden states and weights when these agree. The running sum is that of flash attention (Dao et al., 2022, arXiv
    2205.14135); the label's term of the slope is kept apart and exact, since it nearly cancels the others where a token
    is almost certain. Two calls with equal shapes agree bit for bit, with gradients or without.

    Args: hidden (N, H), the states that predict the labels; labels (N,) long in [0, V); head; temperature > 0;
        entropy_grad, whether the entropies' slope is wanted, a third product in the same sweep (without it, a backward
        that asks for it sweeps again); max_block_elements, the most logits at once (None: by device).
    Returns: logps (N,) and entropies (N,) in nats, fp32 or fp64, differentiable once by `hidden`. Nothing is masked.

    >>> head = LinearHead(torch.zeros(3, 2))
    >>> frozen_head_logps_and_entropy(torch.ones(2, 2), torch.tensor([0, 2]), head, 0.7)
    (tensor([-1.0986, -1.0986]), tensor([1.0986, 1.0986]))
    """
    most_rows, most_elements = _ON_A_GPU
    most_rows = _MOST_ROWS.get(hidden.device.type, most_rows)
    elements = max_block_elements or _BLOCK_ELEMENTS.get(hidden.device.type, most_elements)
    total = hidden.shape[0]
    rows = equal_chunk_rows(total, most_rows)  # of one size: rounding in a product depends on its shape
    block = max(1, elements // rows)
    parts = []
    for states, targets in zip(hidden.split(rows), labels.split(rows), strict=True):
        filler = rows - states.shape[0]
        if filler:
            states, targets = F.pad(states, (0, 0, 0, filler)), F.pad(targets, (0, filler))
        parts.append(_FrozenHead.apply(states, targets, head, temperature, entropy_grad, block))
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps)[:total], torch.cat(entropies)[:total]


def _has_wide_sums(weight: Tensor) -> bool:
    """Whether torch can multiply half-precision matrices into an fp32 one there."""
    return weight.is_cuda


@contextmanager
def _bf16_products() -> Iterator[None]:
    """A CPU that has bf16 products takes them for fp32 matrices, whose numbers must then all be bf16's."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


class _FrozenHead(torch.autograd.Function):
    """Keeps the slopes of log-prob and entropy by the hidden state, (N, H) each."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, head: LinearHead, temperature: float, entropy_grad: bool, block: int
    ) -> tuple[Tensor, Tensor]:
        sweep = _Sweep(hidden, labels, head, temperature, ctx.needs_input_grad[0], entropy_grad).over(block)
        logps, entropies = sweep.logps(), sweep.entropies()
        if ctx.needs_input_grad[0]:
            by_logp, by_entropy = sweep.slopes(logps, entropies)
            ctx.save_for_backward(hidden, labels, by_logp, by_entropy)
            ctx.settings = head, temperature, block
            ctx.set_materialize_grads(False)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, labels, by_logp, by_entropy = ctx.saved_tensors
        gradient = torch.zeros_like(by_logp) if grad_logps is None else grad_logps.unsqueeze(-1) * by_logp
        if grad_entropies is not None:
            if by_entropy is None:
                head, temperature, block = ctx.settings
                sweep = _Sweep(hidden, labels, head, temperature, True, True).over(block)
                by_entropy = sweep.slopes(sweep.logps(), sweep.entropies())[1]
            gradient.addcmul_(grad_entropies.unsqueeze(-1), by_entropy)
        return gradient.to(hidden.dtype), None, None, None, None, None


class _Sweep:
    """Sums over the vocabulary as its blocks go by. With m the greatest logit so far, z' = z - m and e = exp(z'):

    `mass` sum e, `mean` sum e z'; over all but the label `others` sum e, `pull` sum e W, `turn` sum e z' W.
    """

    def __init__(
        self, hidden: Tensor, labels: Tensor, head: LinearHead, temperature: float, grad: bool, entropy_grad: bool
    ) -> None:
        self.head, self.temperature, self.labels = head, temperature, labels
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.narrow = hidden.dtype if hidden.dtype == head.weight.dtype else wide
        self.hidden, self.narrow_hidden = hidden.to(wide), hidden.detach()
        zeros = self.hidden.new_zeros
        rows, size = hidden.shape
        self.top = torch.full((rows, 1), _BELOW_ALL, dtype=wide, device=hidden.device)
        self.mass, self.mean, self.chosen, self.others = (zeros(rows, 1) for _ in range(4))
        self.chosen_slope = torch.ones_like(self.chosen)
        self.grad, self.entropy_grad = grad, grad and entropy_grad
        self.pull, self.turn = (zeros(rows, size if wanted else 0) for wanted in (self.grad, self.entropy_grad))

    def over(self, block: int) -> _Sweep:
        """All words, `block` at a time; autocast would round the logits."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            for start in range(0, len(self.head.weight), block):
                self.add(start, min(start + block, len(self.head.weight)))
        return self

    def add(self, start: int, end: int) -> None:
        """The logits of words start .. end - 1."""
        weight = self.head.weight[start:end]
        logits = self.product(weight)
        if self.head.bias is not None:
            logits.add_(self.head.bias[start:end])
        if self.head.scale != 1.0:
            logits.mul_(self.head.scale)
        slope = None
        if self.head.cap is not None:
            squashed = logits.div_(self.head.cap).tanh_()
            slope = 1.0 - squashed.square() if self.grad else None
            logits = squashed.mul_(self.head.cap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        here = ((self.labels >= start) & (self.labels < end)).unsqueeze(1)
        column = (self.labels - start).clamp(0, end - start - 1).unsqueeze(1)
        self.chosen = torch.where(here, logits.gather(1, column), self.chosen)
        if slope is not None:
            self.chosen_slope = torch.where(here, slope.gather(1, column), self.chosen_slope)

        top = torch.maximum(self.top, logits.amax(1, keepdim=True))
        shift, factor = self.top - top, (self.top - top).exp()
        self.top = top
        logits.sub_(top).clamp_(min=_LOG_OF_ZERO)
        weights = logits.exp()
        self.mean = (self.mean + shift * self.mass) * factor + torch.linalg.vecdot(weights, logits).unsqueeze(1)
        self.mass = self.mass * factor + weights.sum(1, keepdim=True)
        if not self.grad:
            return
        weights.scatter_(1, column, torch.where(here, 0.0, weights.gather(1, column)))
        self.others = self.others * factor + weights.sum(1, keepdim=True)
        if slope is not None:
            weights.mul_(slope)
        matrix = weight.to(self.narrow)
        if self.entropy_grad:
            self.turn.addcmul_(self.pull, shift).mul_(factor)
            self.turn.add_(logits.mul_(weights).to(self.narrow) @ matrix)
        self.pull.mul_(factor).add_(weights.to(self.narrow) @ matrix)

    def product(self, weight: Tensor) -> Tensor:
        """h W^T in fp32. Where h and W are in one half precision it is a product of those, with sums in fp32: that
        rounds nothing and is several times as fast."""
        if self.narrow.itemsize < 4 and _has_wide_sums(weight):
            return torch.mm(self.narrow_hidden, weight.T, out_dtype=torch.float32)
        with _bf16_products() if self.narrow == torch.bfloat16 and weight.is_cpu else nullcontext():
            return self.hidden @ weight.to(self.hidden.dtype).T

    def logps(self) -> Tensor:
        """log p of the label, (N,)."""
        return (self.chosen - self.top - self.mass.log()).squeeze(1)

    def entropies(self) -> Tensor:
        """-sum p log p = log mass - mean / mass, (N,); rounding must not make it negative."""
        return (self.mass.log() - self.mean / self.mass).clamp_(min=0.0).squeeze(1)

    def slopes(self, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        """d logp / d h = (1 - p_y) W_y - sum' p W and d H / d h = -sum p (log p + H) W, (N, H) each; sum' leaves the
        label y out, 1 - p_y is the others' share."""
        label = self.head.weight[self.labels].to(self.hidden.dtype) * self.chosen_slope
        outer = self.head.scale / self.temperature
        by_logp = (self.others * label - self.pull).div_(self.mass).mul_(outer).to(self.narrow)
        if not self.entropy_grad:
            return by_logp, None
        own = logps.exp() * (logps + entropies)
        rest = self.turn + (entropies.unsqueeze(1) - self.mass.log()) * self.pull
        return by_logp, (rest.div_(self.mass) + own.unsqueeze(1) * label).mul_(-outer).to(self.narrow)
