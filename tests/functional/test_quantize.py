"""Contract tests of every storage kind; bitsandbytes is the oracle of its own two formats."""

import pytest
import torch

from trl_alpharl.functional.quantize import decode, encode, stochastic_round
from trl_alpharl.shapes import STORAGE, storage_bytes

EVERY = pytest.mark.parametrize("kind", STORAGE)
# Largest error over a block's largest magnitude: half the coarsest step of the format.
WORST = {"fp32": 0, "bf16": 2**-8, "fp8": 16 / 448, "int8": 0.5 / 127, "8bit": 0.007 + 2**-9, "nf4": 0.16}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@EVERY
@pytest.mark.parametrize("signed", [True, False])
def test_the_error_is_within_half_a_step_of_the_block(kind, signed):
    tensor = normal(40, 50) * torch.logspace(-6, 3, 40)[:, None]
    tensor = tensor if signed else tensor.abs()
    error = (decode(encode(tensor, kind, signed), kind, tensor.shape, signed) - tensor).flatten().abs()
    block = STORAGE[kind][1] or 1
    largest = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % block)).view(-1, block).abs().amax(1)
    bound = WORST[kind] * largest.repeat_interleave(block)[: tensor.numel()]
    assert (error <= bound * 1.01 + 1e-30).all()


@EVERY
def test_encoding_what_was_decoded_changes_nothing(kind):
    tensor = normal(33, 65)
    tensor.view(-1)[::64] = 9.0  # the dynamic map has 1 but not -1: a negative largest would shift the scale
    once = encode(tensor, kind)
    number = decode(once, kind, tensor.shape)
    twice = decode(encode(number, kind), kind, tensor.shape)
    torch.testing.assert_close(twice, number, rtol=1e-6, atol=1e-7)


@EVERY
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_any_size_comes_back_and_costs_what_the_formula_says(kind, size):
    encoded = encode(normal(size), kind)
    assert decode(encoded, kind, (size,)).shape == (size,)
    assert encoded.codes.nbytes + (0 if encoded.scales is None else encoded.scales.nbytes) == storage_bytes(size, kind)


@EVERY
def test_zeros_stay_zeros(kind):
    assert decode(encode(torch.zeros(300), kind), kind, (300,)).abs().max() == 0


@EVERY
def test_a_positive_number_never_becomes_zero_in_a_second_moment(kind):
    tensor = torch.full((256,), 1e-4)
    tensor[::64] = 1.0  # the block's scale
    tensor[5] = 0.0
    number = decode(encode(tensor, kind, signed=False), kind, tensor.shape, signed=False)
    assert (number > 0).tolist() == (tensor > 0).tolist()


@EVERY
def test_the_blocks_do_not_see_each_other(kind):
    tensor = normal(512)
    loud = tensor.clone()
    loud[256:] *= 1e6
    first = [decode(encode(t, kind), kind, (512,))[:256] for t in (tensor, loud)]
    assert torch.equal(*first)


def test_dynamic_8_bit_is_bitsandbytes_format():
    functional = pytest.importorskip("bitsandbytes.functional")
    tensor = normal(64, 64)
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed=signed)
        numbers = tensor if signed else tensor.abs()
        codes, state = functional.quantize_blockwise(numbers, code=theirs, blocksize=256)
        ours = encode(numbers, "8bit", signed)
        assert (ours.codes.int() - codes.flatten().int()).abs().max() <= 1
        assert (ours.codes != codes.flatten()).float().mean() < 0.1  # numbers at the border of two codes
        torch.testing.assert_close(ours.scales, state.absmax.flatten())
        back = functional.dequantize_blockwise(ours.codes.view_as(codes), state)
        torch.testing.assert_close(decode(ours, "8bit", tensor.shape, signed), back, rtol=1e-5, atol=1e-6)


def test_nf4_is_bitsandbytes_format():
    functional = pytest.importorskip("bitsandbytes.functional")
    tensor = normal(64, 64)
    codes, state = functional.quantize_4bit(tensor, quant_type="nf4", blocksize=64)
    ours = encode(tensor, "nf4")
    assert torch.equal(ours.codes, codes.flatten())
    torch.testing.assert_close(decode(ours, "nf4", tensor.shape), functional.dequantize_4bit(codes, state))


def test_stochastic_rounding_goes_to_a_neighbour_and_keeps_the_mean():
    tensor = normal(20_000) * 3
    rounded = torch.stack([stochastic_round(tensor, torch.Generator().manual_seed(seed)).float() for seed in range(20)])
    step = 2.0 ** (tensor.abs().log2().floor() - 7)
    assert ((rounded - tensor).abs() < step * 1.0001).all()
    assert ((rounded - tensor) / step).mean().abs() < 2e-3
    exact = torch.tensor([1.0, -2.5, 0.0, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(exact, torch.Generator()).float(), exact)
    assert stochastic_round(torch.tensor([float("nan")]), torch.Generator()).isnan().all()


def test_small_updates_add_up_under_stochastic_rounding_alone():
    update, count = 2.0**-11, 400
    nearest = torch.ones(2000, dtype=torch.bfloat16)
    random = nearest.clone()
    for seed in range(count):
        nearest = (nearest.float() + update).bfloat16()
        random = stochastic_round(random.float() + update, torch.Generator().manual_seed(seed))
    assert nearest.float().mean() == 1.0
    assert random.float().mean() == pytest.approx(1 + count * update, rel=0.01)
