"""Tensors in fewer bits: pure encoders and decoders, and stochastic rounding.

Blocks of consecutive elements share one fp32 scale, their largest magnitude over the largest code. Second moments go
in as square roots, which halves the range of exponents they need; `signed=False` spends the sign's bit on precision
and never turns a positive number into zero, since a zero under Adam's fraction would make a huge step of a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import STORAGE


class Encoded(NamedTuple):
    """A tensor in another form. `scales`: one fp32 number a block, or None where the codes are numbers themselves."""

    codes: Tensor
    scales: Tensor | None


def encode(tensor: Tensor, kind: str, signed: bool = True) -> Encoded:
    """A tensor of any shape as `kind`, one of `shapes.STORAGE`; codes are flat and padded to whole blocks.

    Args: signed=False promises that nothing in it is negative.

    >>> encoded = encode(torch.tensor([0.0, 1.0, -2.0]), "int8")
    >>> encoded.codes[:3].tolist(), [round(x * 127, 4) for x in encoded.scales.tolist()]
    ([0, 64, -127], [2.0])
    """
    if kind == "fp32":
        return Encoded(tensor.float(), None)
    if kind == "bf16":
        return Encoded(tensor.to(torch.bfloat16), None)
    code = _CODES[kind]
    block = STORAGE[kind][1]
    flat = tensor.float().flatten()
    if flat.numel() % block:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % block))
    flat = flat.view(-1, block)
    scales = flat.abs().amax(1) / code.largest(signed)
    scaled = flat * torch.where(scales > 0, scales.reciprocal(), 0.0)[:, None]
    return Encoded(code.encode(scaled.flatten(), signed), scales)


def decode(encoded: Encoded, kind: str, shape: torch.Size | tuple[int, ...], signed: bool = True) -> Tensor:
    """The tensor (shape) in fp32. For fp32 it is the stored one itself.

    >>> encoded = encode(torch.tensor([0.5, 1.0, -2.0]), "fp8")
    >>> decode(encoded, "fp8", (3,)).tolist()
    [0.5, 1.0, -2.0]
    """
    if encoded.scales is None:
        return encoded.codes.float()
    numbers = _CODES[kind].decode(encoded.codes, signed).view(len(encoded.scales), STORAGE[kind][1])
    flat = numbers.mul_(encoded.scales[:, None]).flatten()
    size = torch.Size(shape)
    return flat[: size.numel()].view(size)


def stochastic_round(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bf16, up or down at random so that the mean is kept.

    A bf16 weight keeps 8 bits: updates below 2^-9 of it vanish when rounding to the nearest.

    >>> tensor = torch.full((4096,), 1.0 + 2.0**-10)
    >>> rounded = stochastic_round(tensor, torch.Generator().manual_seed(0)).float()
    >>> sorted(set(rounded.tolist())), abs(float(rounded.mean()) - 1.0 - 2.0**-10) < 2e-4
    ([1.0, 1.0078125], True)
    """
    draws = torch.empty(-(-tensor.numel() // 4), dtype=torch.int64, device=tensor.device)
    draws.random_(-(2**63), None, generator=generator)  # four 16-bit numbers a draw
    noise = draws.view(torch.int16)[: tensor.numel()].view(tensor.shape).to(torch.int32) & 0xFFFF
    bits = tensor.contiguous().view(torch.int32)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor).to(torch.bfloat16)


class _Code(NamedTuple):
    """How numbers in [-largest, largest], flat and a whole number of blocks, become codes and back."""

    largest: Callable[[bool], float]
    encode: Callable[[Tensor, bool], Tensor]
    decode: Callable[[Tensor, bool], Tensor]


def _encode_fp8(numbers: Tensor, signed: bool) -> Tensor:
    codes = numbers.to(torch.float8_e4m3fn)
    if signed:
        return codes
    smallest = torch.tensor(2.0**-9, device=numbers.device)
    return torch.where(numbers > 0, numbers.maximum(smallest), numbers).to(torch.float8_e4m3fn)


def _decode_fp8(codes: Tensor, signed: bool) -> Tensor:
    return codes.float()


def _encode_int8(numbers: Tensor, signed: bool) -> Tensor:
    if signed:
        return numbers.round().to(torch.int8)
    return torch.where(numbers > 0, numbers.round().clamp_(min=1.0), numbers).to(torch.uint8)


def _decode_int8(codes: Tensor, signed: bool) -> Tensor:
    return codes.float()


def _encode_dynamic(numbers: Tensor, signed: bool) -> Tensor:
    """By table: the nearest code for each of the 65,536 bf16 numbers; rounding to bf16 first moves a number by less
    than a quarter of the step between codes."""
    table = _nearest_code(signed, numbers.device)
    bits = numbers.to(torch.bfloat16).view(torch.uint16).to(torch.int32)
    return table.index_select(0, bits)


def _decode_dynamic(codes: Tensor, signed: bool) -> Tensor:
    return _dynamic_map(signed).to(codes.device).index_select(0, codes.to(torch.int32))


def _encode_nf4(numbers: Tensor, signed: bool) -> Tensor:
    levels = _nf4_levels().to(numbers.device)
    codes = torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    if not signed:  # the level above zero
        codes = torch.where((numbers > 0) & (codes == 7), torch.full_like(codes, 8), codes)
    return codes[::2] << 4 | codes[1::2]


def _decode_nf4(codes: Tensor, signed: bool) -> Tensor:
    pairs = torch.stack([codes >> 4, codes & 15], dim=1).flatten().to(torch.int32)
    return _nf4_levels().to(codes.device).index_select(0, pairs)


@cache
def _dynamic_map(signed: bool) -> Tensor:
    """The 256 numbers of dynamic 8-bit quantization (Dettmers et al. 2022, arXiv 2110.02861, section 2.2), ascending.

    Seven decades; each is cut evenly, twice as finely as the one below it. Zero and one are numbers of the map.
    """
    halves = []
    for decade in range(7):
        pieces = 2 ** (decade if signed else decade + 1)
        borders = torch.linspace(0.1, 1.0, pieces + 1, dtype=torch.float64)
        halves.append((borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - 6))
    positive = torch.cat(halves)
    parts = [-positive, positive] if signed else [positive]
    numbers = torch.cat([*parts, torch.tensor([0.0, 1.0], dtype=torch.float64)]).sort().values
    return numbers.float()


@cache
def _nearest_code(signed: bool, device: torch.device) -> Tensor:
    numbers = _dynamic_map(signed)
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().nan_to_num()
    codes = torch.bucketize(bf16, (numbers[1:] + numbers[:-1]) / 2)
    if not signed:
        codes = torch.where(bf16 > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).to(device)


@cache
def _nf4_levels() -> Tensor:
    """NormalFloat-4 (Dettmers et al. 2023, arXiv 2305.14314, appendix E): quantiles of a normal distribution, zero
    among them, scaled to [-1, 1]."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([positive, torch.zeros(1, dtype=torch.float64), negative]).sort().values
    return (levels / levels.max()).float()


_CODES = {
    "fp8": _Code(lambda signed: 448.0, _encode_fp8, _decode_fp8),
    "int8": _Code(lambda signed: 127.0 if signed else 255.0, _encode_int8, _decode_int8),
    "8bit": _Code(lambda signed: 1.0, _encode_dynamic, _decode_dynamic),
    "nf4": _Code(lambda signed: 1.0, _encode_nf4, _decode_nf4),
}
