import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_alpharl.functional import frozen_head
from trl_alpharl.functional.frozen_head import LinearHead, frozen_head_logps_and_entropy


def oracle(hidden, labels, head, temperature):
    """torch's own distribution over all logits, in float64, with its own autograd graph."""
    logits = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(labels), distribution.entropy()


def problem(dtype=torch.float32, rows=23, size=16, words=301, spread=1.0, bias=True, scale=1.0, cap=None):
    torch.manual_seed(0)
    head = LinearHead(torch.randn(words, size).to(dtype), torch.randn(words).to(dtype) if bias else None, scale, cap)
    hidden = (spread * torch.randn(rows, size)).to(dtype).requires_grad_()
    return hidden, torch.randint(words, (rows,)), head


def gradients(function, hidden, *args, **kwargs):
    """Values, and the gradient of a random mix of both outputs."""
    generator = torch.Generator().manual_seed(1)
    outputs = function(hidden, *args, **kwargs)
    mix = sum((torch.randn(len(hidden), generator=generator).to(out.dtype) * out).sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(mix, hidden)]


@pytest.mark.parametrize("spread, scale, cap, bias", product((1.0, 12.0), (1.0, 0.3), (None, 5.0), (True, False)))
def test_equals_the_softmax_over_all_words(spread, scale, cap, bias):
    hidden, labels, head = problem(torch.float64, spread=spread, scale=scale, cap=cap, bias=bias)
    wanted = gradients(oracle, hidden, labels, head, 0.7)
    found = gradients(frozen_head_logps_and_entropy, hidden, labels, head, 0.7, max_block_elements=23 * 37)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-10)


@settings(max_examples=30)
@given(rows=st.integers(1, 9), words=st.integers(2, 40), elements=st.integers(1, 400), seed=st.integers(0, 99))
def test_block_borders_do_not_matter(rows, words, elements, seed):
    generator = torch.Generator().manual_seed(seed)
    head = LinearHead(torch.randn(words, 3, generator=generator, dtype=torch.float64))
    hidden = torch.randn(rows, 3, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(words, (rows,), generator=generator)
    found = gradients(frozen_head_logps_and_entropy, hidden, labels, head, 1.0, max_block_elements=elements)
    for one, other in zip(found, gradients(oracle, hidden, labels, head, 1.0)):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-10)


def test_entropies_asked_for_in_the_backward_alone_get_the_same_gradient():
    hidden, labels, head = problem(torch.float64)
    with_slope, without = (
        gradients(frozen_head_logps_and_entropy, hidden, labels, head, 0.7, entropy_grad=asked)
        for asked in (True, False)
    )
    for one, other in zip(with_slope, without):
        assert torch.equal(one, other)


def test_gradients_or_not_the_numbers_are_the_same_bits():
    hidden, labels, head = problem(torch.bfloat16, rows=1500)  # more than one sweep, the last one filled up
    with torch.no_grad():
        alone = frozen_head_logps_and_entropy(hidden, labels, head, 0.7)
    for asked in (True, False):
        for one, other in zip(alone, frozen_head_logps_and_entropy(hidden, labels, head, 0.7, entropy_grad=asked)):
            assert torch.equal(one, other.detach())


def test_half_precision_rounds_slopes_only():
    hidden, labels, head = problem(torch.bfloat16)
    wanted = gradients(oracle, hidden, labels, head, 0.7)
    found = gradients(frozen_head_logps_and_entropy, hidden, labels, head, 0.7)
    for one, other in zip(found[:2], wanted[:2]):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    assert (found[2] - wanted[2]).norm() < 0.005 * wanted[2].norm()


def test_bf16_products_are_summed_in_fp32_and_leave_the_setting_as_it_was():
    """The logits of bf16 numbers are as near to fp64's as fp32's are, whichever kernel the machine has for them."""
    hidden, labels, head = problem(torch.bfloat16, rows=512)
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with torch.no_grad():
        logps = frozen_head_logps_and_entropy(hidden, labels, head, 0.7)[0]
    wide = LinearHead(head.weight.double(), None if head.bias is None else head.bias.double(), head.scale, head.cap)
    exact = frozen_head_logps_and_entropy(hidden.double(), labels, wide, 0.7)[0]
    torch.testing.assert_close(logps.double(), exact, atol=1e-5, rtol=1e-6)
    with pytest.raises(IndexError):
        frozen_head_logps_and_entropy(hidden[0, 0], labels, head, 0.7)
    assert settings.fp32_precision == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_logits_are_one_product_in_the_weights_precision_with_fp32_sums(monkeypatch, dtype):
    """Without a GPU: what torch is asked for, answered here."""
    hidden, labels, head = problem(dtype)
    expected = gradients(frozen_head_logps_and_entropy, hidden, labels, head, 0.7)
    asked = []

    def mm(left, right, *, out_dtype):
        asked.append((left.dtype, right.dtype, out_dtype))
        return left.float() @ right.float()

    monkeypatch.setattr(frozen_head, "_has_wide_sums", lambda weight: True)
    monkeypatch.setattr(torch, "mm", mm)
    found = gradients(frozen_head_logps_and_entropy, hidden, labels, head, 0.7)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert asked == ([] if dtype == torch.float32 else [(dtype, dtype, torch.float32)])
    assert torch.ops.aten.mm.dtype  # which torch.mm with out_dtype is


def test_an_almost_certain_token_keeps_its_small_slope_in_half_precision():
    """1 - p_y is 3e-4 here: a softmax rounded to bf16 would have lost it."""
    weight = torch.tensor([[8.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[1.0, 0.25]], dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.autograd.grad(oracle(hidden, torch.tensor([0]), LinearHead(weight), 1.0)[0].sum(), hidden)[0]
    found = torch.autograd.grad(
        frozen_head_logps_and_entropy(hidden, torch.tensor([0]), LinearHead(weight), 1.0)[0].sum(), hidden
    )[0]
    torch.testing.assert_close(found, wanted, atol=0.0, rtol=0.02)


def test_autocast_does_not_round_the_logits():
    hidden, labels, head = problem()
    plain = frozen_head_logps_and_entropy(hidden, labels, head, 0.7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one, other in zip(plain, frozen_head_logps_and_entropy(hidden, labels, head, 0.7)):
            assert torch.equal(one, other)


def test_words_that_are_forbidden_have_no_share():
    hidden = torch.zeros(1, 2, requires_grad=True)
    head = LinearHead(torch.ones(3, 2), torch.tensor([0.0, 0.0, -torch.inf]))
    logps, entropies = frozen_head_logps_and_entropy(hidden, torch.tensor([1]), head, 1.0, max_block_elements=1)
    assert logps.item() == pytest.approx(-math.log(2)) and entropies.item() == pytest.approx(math.log(2))
    assert torch.autograd.grad(logps.sum() + entropies.sum(), hidden)[0].isfinite().all()


def test_a_nan_in_a_hidden_state_stays_in_its_row():
    hidden, labels, head = problem()
    with torch.no_grad():
        hidden[3, 0] = torch.nan
    logps, entropies = frozen_head_logps_and_entropy(hidden, labels, head, 1.0)
    assert logps.isnan().tolist() == entropies.isnan().tolist() == [row == 3 for row in range(23)]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_exist_for_one_block_only():
    hidden, labels, head = problem(rows=20, size=4, words=1000)
    with Largest() as seen:
        gradients(frozen_head_logps_and_entropy, hidden, labels, head, 1.0, max_block_elements=400)
    assert seen.elements == 400  # all logits would be 20000
