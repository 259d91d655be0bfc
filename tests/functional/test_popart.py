import json

import pytest
import torch

from trl_alpharl.functional.masking import masked_moments
from trl_alpharl.functional.popart import PopArt, rescale_head


def moments_of(values: torch.Tensor) -> torch.Tensor:
    return masked_moments(values, torch.ones_like(values, dtype=torch.bool))


def test_predictions_do_not_change_when_the_units_do():
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(1, 8, generator=generator), torch.randn(1, generator=generator)
    hidden = torch.randn(20, 8, generator=generator)
    popart = PopArt(decay=0.9)
    before = popart.denormalize(hidden @ weight.T + bias)
    for step in range(5):
        returns = torch.randn(64, generator=generator) * 10**step + 3 * step
        weight, bias = rescale_head(weight, bias, *popart.update(moments_of(returns)))
        torch.testing.assert_close(popart.denormalize(hidden @ weight.T + bias), before, rtol=1e-3, atol=1e-3)
    assert popart.spread > 100


def test_the_way_in_and_out():
    popart = PopArt(decay=0.0)
    returns = torch.tensor([1.0, 5.0, 9.0, 9.0])
    popart.update(moments_of(returns))
    inside = popart.normalize(returns)
    assert float(inside.mean()) == pytest.approx(0, abs=1e-6)
    assert float(inside.square().mean()) == pytest.approx(1)
    torch.testing.assert_close(popart.denormalize(inside), returns)


def test_first_batch_counts_whole_and_constant_returns_keep_the_spread():
    popart = PopArt(decay=0.9)
    popart.update(moments_of(torch.tensor([0.0, 4.0])))
    assert (popart.mean, popart.spread) == (2.0, 2.0)
    popart = PopArt(decay=0.0)
    popart.update(moments_of(torch.full((5,), 0.1)))
    assert popart.mean == pytest.approx(0.1) and popart.spread == 1.0
    popart.update(torch.zeros(3, dtype=torch.float64))
    assert popart.mean == pytest.approx(0.1)


def test_state_goes_on_bit_for_bit():
    straight, resumed = PopArt(0.7), PopArt(0.7)
    straight.update(moments_of(torch.tensor([1.0, 2.0])))
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for popart in (straight, resumed):
        popart.update(moments_of(torch.tensor([5.0, 9.0])))
    assert straight.state_dict() == resumed.state_dict()
