"""What a PPO update of a Llama-like model must compute and move at least, and how fast this machine can."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_alpharl.shapes import decoder_matrices

WEIGHT_BYTES = {"bfloat16": 2.0, "float32": 4.0, "nf4": 0.516}  # nf4 with nested statistics
FORWARD, BACKWARD = 1, 1  # passes over the frozen weights: their own gradients are never formed


@dataclass(frozen=True)
class Sizes:
    """A decoder in numbers of weights, and what of it learns."""

    layers: int
    layer: int  # weights of one layer's matrices
    head: int  # weights of the head
    attention: int  # heads x head size
    key_value: int  # key-value heads x head size
    adapters: int  # trained weights, the critic's included
    top_layers: int  # layers with adapters
    trunks: int  # passes with adapters that every training step takes: 2 with a critic adapter
    weight_bytes: float
    head_bytes: float

    @classmethod
    def of(cls, config: Any, dtype: str, adapters: int, top_layers: int | None, critic: str) -> Sizes:
        """From a transformers configuration."""
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        key_value = config.num_key_value_heads * head_size
        matrices = dict(
            decoder_matrices(config.hidden_size, config.intermediate_size, 1, key_value, config.vocab_size, tied=True)
        )
        embedded = matrices.pop("embed_tokens")
        return cls(
            layers=config.num_hidden_layers,
            layer=sum(rows * columns for rows, columns in matrices.values()),
            head=embedded[0] * embedded[1],
            attention=config.num_attention_heads * head_size,
            key_value=key_value,
            adapters=adapters,
            top_layers=config.num_hidden_layers if top_layers is None else top_layers,
            trunks=2 if critic == "adapter" else 1,
            weight_bytes=WEIGHT_BYTES[dtype],
            head_bytes=WEIGHT_BYTES["float32" if dtype == "float32" else "bfloat16"],
        )


@dataclass(frozen=True)
class Cost:
    """FLOPs (a multiply-add counts as two) and bytes of a phase."""

    flops: float
    bytes: float


def phase_costs(
    sizes: Sizes, prompts: Sequence[int], completions: Sequence[int], ppo_epochs: int, micro_batch: int
) -> dict[str, Cost]:
    """The least that rollout, score and update take for rows of these lengths, in tokens.

    Nothing is computed twice: no recompute, no padding, the layers below the first adapter once a rollout. Bytes are
    those of weights, once a pass of a chunk, and of the key-value cache while generating; activations are left out.
    """
    lengths = [prompt + answer for prompt, answer in zip(prompts, completions)]
    tokens, answers = sum(lengths), sum(completions)
    pairs = sum(length * (length + 1) / 2 for length in lengths)  # (query, key) of causal attention
    layer = 2 * sizes.layer * tokens + 4 * sizes.attention * pairs  # of one layer, forward
    head = 2 * sizes.head * answers
    adapters = 2 * sizes.adapters * tokens
    trunk_bytes = sizes.layers * sizes.layer * sizes.weight_bytes + sizes.head * sizes.head_bytes
    top_bytes = sizes.top_layers * sizes.layer * sizes.weight_bytes + sizes.head * sizes.head_bytes
    cached = sum(
        prompt * answer + answer * (answer - 1) / 2 for prompt, answer in zip(prompts, completions)
    )  # positions read from the cache, over all steps
    chunks = -(-len(lengths) // micro_batch)
    lower = sizes.layers - sizes.top_layers
    return {
        "rollout": Cost(
            sizes.layers * layer + head,
            max(completions) * trunk_bytes + cached * sizes.layers * 2 * sizes.key_value * sizes.head_bytes,
        ),
        # The reference is a pass without adapters; policy, reference and critic share what lies below the adapters.
        "score": Cost(
            (lower + (1 + sizes.trunks) * sizes.top_layers) * layer + 2 * head + adapters,
            chunks * (trunk_bytes + sizes.trunks * top_bytes),
        ),
        # Adapters have gradients of their own, frozen weights have not.
        "update": Cost(
            ppo_epochs * ((FORWARD + BACKWARD) * (sizes.trunks * sizes.top_layers * layer + head) + 3 * adapters),
            ppo_epochs * chunks * (FORWARD + BACKWARD) * sizes.trunks * top_bytes,
        ),
    }


@dataclass(frozen=True)
class Rates:
    """What this machine was measured to do."""

    flops_per_s: float
    bytes_per_s: float

    def floor_s(self, cost: Cost) -> float:
        """The least seconds: computing and moving may overlap."""
        return max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s)


def measure_rates(rows: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str) -> Rates:
    """A matrix product of a chunk's size (rows x hidden x intermediate), and a copy of a large tensor."""
    left = torch.randn(rows, hidden, device=device, dtype=dtype)
    right = torch.randn(intermediate, hidden, device=device, dtype=dtype)
    product_s = _best(lambda: torch.nn.functional.linear(left, right), device)
    size = 2**30 if device == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source), device)
    return Rates(2 * rows * hidden * intermediate / product_s, 2 * size / copy_s)


def _best(call: Callable[[], Tensor], device: str, seconds: float = 0.5) -> float:
    """The shortest of the calls that fit into so many seconds."""
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
