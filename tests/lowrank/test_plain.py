"""Parameters that are not projected."""

import pytest
import torch
from torch import nn

from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.optimizer import LowRankAdamW

FIXED = {"refresh": "random", "update_gap": 0}


def test_without_projection_it_is_torch_s_adamw(network, exact, train, weights):
    ours, theirs = network(), network()
    kwargs = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    first = LowRankAdamW([{"params": list(ours.parameters()), "rank": 0}], config=exact(), **kwargs)
    second = torch.optim.AdamW(theirs.parameters(), **kwargs)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) for optimizer in (first, second)]
    for step in range(8):
        for model, optimizer, schedule in zip((ours, theirs), (first, second), schedules):
            train(model, optimizer, [step])
            schedule.step()
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)


def test_vectors_scalars_and_small_matrices_get_plain_adamw(network, exact):
    model = network()
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    assert set(optimizer._matrices) == {model.first.weight, model.second.weight}


def test_8_bit_moments_train_alike_and_take_a_quarter_of_the_bytes():
    sizes, ends = {}, {}
    for kind in ("fp32", "8bit"):
        torch.manual_seed(0)
        model = nn.Linear(128, 64)
        config = LowRankConfig(plain_storage=kind)
        optimizer = LowRankAdamW([{"params": list(model.parameters()), "rank": 0}], lr=1e-2, config=config)
        target = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
        for _ in range(60):
            (model.weight - target).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sizes[kind], ends[kind] = optimizer.state_bytes(), model.weight.detach()
    assert sizes["fp32"] / sizes["8bit"] > 3.9
    assert (ends["8bit"] - ends["fp32"]).norm() < 0.03 * ends["fp32"].norm()


@pytest.mark.parametrize("rounding", [True, False])
def test_bf16_vectors_round_at_random_too(rounding):
    vector = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = LowRankAdamW([vector], lr=1e-4, config=LowRankConfig(stochastic_rounding=rounding))
    for _ in range(20):
        vector.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = 1 - float(vector.float().mean())
    assert moved == pytest.approx(20 * 1e-4, rel=0.1) if rounding else moved == 0
