"""Frozen RMSNorm layers as one operation: the same bits forward, the same gradient, far less kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trl_alpharl.roles.fused_norm import fuse_norm_layers


@pytest.fixture
def norm():
    layer = LlamaRMSNorm(48, eps=1e-5).requires_grad_(False)
    nn.init.normal_(layer.weight, 1.0, 0.3)
    return layer


def states(dtype=torch.float32, *shape):
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(*(shape or (2, 5, 48)), generator=generator)).to(dtype).requires_grad_()


def pulled_back(layer, x):
    """The output, and the input's gradient for a gradient of normal numbers."""
    out = layer(x)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, x, pull)[0]


def exact(layer, x):
    """By the definition, in fp64."""
    wide = x.detach().double().requires_grad_()
    out = layer.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + layer.variance_epsilon).sqrt()
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype).double()
    return out.detach(), torch.autograd.grad(out, wide, pull)[0]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_and_the_gradient_of_the_definition(norm, kind, dtype):
    layer = kind(48, eps=1e-5).requires_grad_(False)
    layer.weight.copy_(norm.weight)
    layer.to(dtype)
    x = states(dtype)
    plain, plain_gradient = pulled_back(layer, x)
    assert fuse_norm_layers(layer) == 1
    fused, gradient = pulled_back(layer, x)
    assert torch.equal(fused, plain)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(gradient, plain_gradient, **tolerance)
    torch.testing.assert_close(gradient.double(), exact(layer, x)[1], **tolerance)


def test_the_bf16_gradient_is_no_further_from_the_definition_than_transformers_own(norm):
    x, layer = states(torch.bfloat16, 400, 48), norm.to(torch.bfloat16)
    truth = exact(layer, x)[1]
    own = (pulled_back(layer, x)[1].double() - truth).square().mean()
    fuse_norm_layers(layer)
    assert (pulled_back(layer, x)[1].double() - truth).square().mean() <= 1.05 * own


def test_heads_have_norms_too(norm):
    """(rows, tokens, heads, size), as Qwen3 has them."""
    x = states(torch.float32, 2, 5, 3, 48)
    plain = pulled_back(norm, x)
    fuse_norm_layers(norm)
    for one, other in zip(pulled_back(norm, x), plain):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def kept_bytes(layer, x) -> int:
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        layer(x)
    return sum(kept.values())


def test_it_keeps_its_input_and_one_number_a_token(norm):
    layer, x = norm.to(torch.bfloat16), states(torch.bfloat16, 64, 48)
    plain = kept_bytes(layer, x)
    fuse_norm_layers(layer)
    assert kept_bytes(layer, x) == x.nbytes + 64 * 4 + layer.weight.nbytes
    assert plain > 2 * x.nbytes


def test_what_computes_something_else_is_left_alone():
    class ScaledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class NoWeightRMSNorm(nn.Module):
        def forward(self, x):
            return x

    gemma = Gemma2RMSNorm(48)  # (1 + w) x
    nn.init.normal_(gemma.weight)
    others = nn.ModuleList([gemma, ScaledRMSNorm(48), NoWeightRMSNorm(), nn.LayerNorm(48)])
    assert fuse_norm_layers(others) == 0
    assert all("forward" not in vars(layer) for layer in others)


def test_a_layer_that_learns_goes_its_own_way(norm):
    fuse_norm_layers(norm)
    norm.weight.requires_grad_(True)
    norm(states()).sum().backward()
    assert norm.weight.grad.abs().min() > 0


def test_a_copy_runs_with_its_own_weights(norm):
    fuse_norm_layers(norm)
    other = copy.deepcopy(norm)
    with torch.no_grad():
        other.weight.zero_()
    assert not other(states()).any() and norm(states()).any()
