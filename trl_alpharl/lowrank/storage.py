"""Named tensors in an optimizer's state, each in its storage kind.

The state holds tensors, ints and strings alone, so that `torch.load(weights_only=True)` reads a checkpoint. The kind is
stored beside the codes: a run that resumes under another kind reads the old one and writes the new one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from ..functional.quantize import Encoded, decode, encode

_SMALLEST_QUANTIZED = 4096  # as bitsandbytes: below it the bytes are few and one outlier spoils the rest


def store(state: dict[str, Any], name: str, tensor: Tensor, kind: str, signed: bool = True) -> None:
    """Keep a tensor under `name`. A matrix of fewer than 4,096 elements stays fp32."""
    kind = kind if tensor.numel() >= _SMALLEST_QUANTIZED else "fp32"
    encoded = encode(tensor, kind, signed)
    state[name], state[f"{name}_kind"] = encoded.codes, kind
    state.pop(f"{name}_scales", None)
    if encoded.scales is not None:
        state[f"{name}_scales"] = encoded.scales


def fetch(state: dict[str, Any], name: str, shape: torch.Size | tuple[int, ...], signed: bool = True) -> Tensor:
    """The tensor under `name` in fp32. For fp32 storage it is the stored tensor itself, not a copy."""
    encoded = Encoded(state[name], state.get(f"{name}_scales"))
    return decode(encoded, state[f"{name}_kind"], shape, signed)


def store_moments(state: dict[str, Any], mean: Tensor, square: Tensor, kind: str) -> None:
    """Keep Adam's two moments; the second as square roots unless it is fp32."""
    store(state, "mean", mean, kind)
    store(state, "square", square if kind == "fp32" else square.sqrt(), kind, signed=False)
    state["square_is_root"] = int(kind != "fp32")


def fetch_moments(state: dict[str, Any], shape: torch.Size | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Both moments in fp32."""
    square = fetch(state, "square", shape, signed=False)
    return fetch(state, "mean", shape), square.square() if state["square_is_root"] else square


def seeded_generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """A generator that depends on `parts` alone: (seed, parameter index, step, purpose). It is never saved."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)


def tensor_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors in a state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
