import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from trl_alpharl.roles.fused_lora import fuse_lora


class Two(nn.Module):
    """Two linear layers, one with a bias, the first reads data that need no gradient."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = nn.Linear(6, 10, bias=False, dtype=dtype), nn.Linear(10, 4, dtype=dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def pair(dtype=torch.float32, **changes):
    """The same model with trained adapters, PEFT's and ours."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["first", "second"], **changes})
    theirs = get_peft_model(Two(dtype), config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    ours = copy.deepcopy(theirs)
    fused = fuse_lora(ours)
    return theirs, ours, fused


def run(model, x):
    output = model(x)
    output.float().square().sum().backward()
    return output, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_equals_pefts_layer_in_fp32(shape):
    theirs, ours, fused = pair()
    assert fused == 2
    x = torch.randn(shape)
    (output, grads), (wanted, wanted_grads) = run(ours, x), run(theirs, x)
    torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
    assert len(grads) == len(wanted_grads) == 4
    for one, other in zip(grads, wanted_grads):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_is_as_near_to_exact_as_pefts_layer_in_bf16_and_keeps_fp32_gradients():
    theirs, ours, _ = pair(torch.bfloat16)
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(64, 6).bfloat16()
    (output, grads), (wanted, wanted_grads), (truth, _) = run(ours, x), run(theirs, x), run(exact, x.double())
    assert output.dtype == wanted.dtype == torch.bfloat16
    assert [g.dtype for g in grads] == [g.dtype for g in wanted_grads] == [torch.float32] * 4
    error, theirs_error = ((out - truth).norm() / truth.norm() for out in (output, wanted))
    assert error < max(1.5 * theirs_error, 0.01)


def test_the_gradient_passes_through_to_the_input():
    theirs, ours, _ = pair()
    found, wanted = (torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2))
    run(ours, found), run(theirs, wanted)
    torch.testing.assert_close(found.grad, wanted.grad, atol=1e-5, rtol=1e-5)


def test_keeps_one_copy_of_the_input_and_none_in_fp32():
    saved = []
    _, ours, _ = pair(torch.bfloat16)
    x = torch.randn(512, 6).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(x)
    large = [t for t in saved if t.shape[0] == 512]
    assert all(t.dtype == torch.bfloat16 for t in large)
    # inputs of both layers, what goes through both adapters, tanh's output (the second layer's input once more)
    assert len({t.data_ptr() for t in large}) == 4


def test_under_autocast():
    theirs, ours, _ = pair(torch.bfloat16)
    x = torch.randn(9, 6)  # fp32, as norms give it
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = ours(x), theirs(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}, {"bias": "lora_only"}], ids=str
)
def test_what_it_does_not_cover_goes_pefts_way(changes):
    theirs, ours, _ = pair(**changes)
    x = torch.randn(5, 6)
    torch.manual_seed(5)
    found = ours(x)
    torch.manual_seed(5)
    torch.testing.assert_close(found, theirs(x))


def test_switches_and_merging_work_as_before():
    theirs, ours, _ = pair()
    x = torch.randn(5, 6)
    with ours.disable_adapter():
        off = ours(x)
    assert torch.equal(
        off, ours.get_base_model().second.base_layer(torch.tanh(ours.get_base_model().first.base_layer(x)))
    )
    torch.testing.assert_close(ours.merge_and_unload()(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_quantized_and_trained_weights_are_left_alone():
    theirs, ours, _ = pair()
    for model in (theirs, ours):
        model.get_base_model().second.base_layer.weight.requires_grad_(True)
    x = torch.randn(5, 6)
    run(theirs, x), run(ours, x)
    wanted, found = (m.get_base_model().second.base_layer.weight.grad for m in (theirs, ours))
    torch.testing.assert_close(found, wanted)
