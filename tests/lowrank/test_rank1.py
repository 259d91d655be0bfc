import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch import nn

from trl_alpharl.lowrank.rank1 import Rank1Monitor, fit_rank1


def path(deltas):
    flat = torch.stack([d.flatten() for d in deltas])
    return flat @ flat.T


def test_the_fit_is_that_of_the_svd_of_the_stacked_deltas():
    g = torch.Generator().manual_seed(0)
    steps = [3, 6, 9, 12, 15]
    line = torch.randn(40, generator=g, dtype=torch.float64)
    deltas = [t * line + 6 * torch.randn(40, generator=g, dtype=torch.float64) for t in steps]
    fit = fit_rank1(path(deltas), steps)
    u, s, v = np.linalg.svd(torch.stack(deltas).numpy(), full_matrices=False)
    coefficients = u[:, 0] * s[0]
    slope, offset = np.polyfit(steps, coefficients, 1)
    residual = coefficients - slope * np.array(steps) - offset
    assert fit.share == pytest.approx(s[0] ** 2 / (s**2).sum())
    assert fit.r2 == pytest.approx(1 - residual.var() / coefficients.var())
    assert fit.alignment == pytest.approx(abs(deltas[-1].numpy() @ v[0]) / np.linalg.norm(deltas[-1]))
    advance = sum(w * d for w, d in zip(fit.per_step, deltas))
    np.testing.assert_allclose(advance.numpy(), slope * v[0], atol=1e-9)


def test_a_straight_path_is_one_line_and_a_walk_is_not():
    steps = list(range(1, 9))
    straight = fit_rank1(path([t * torch.ones(64) for t in steps]), steps)
    assert (straight.share, straight.r2, straight.alignment) == pytest.approx((1, 1, 1), abs=1e-6)
    g = torch.Generator().manual_seed(1)
    there_and_back = fit_rank1(path([math.sin(t) * torch.ones(64) for t in steps]), steps)
    assert there_and_back.share == pytest.approx(1) and there_and_back.r2 < 0.3
    noise = fit_rank1(path([torch.randn(4000, generator=g) for _ in steps]), steps)
    assert noise.share < 0.2


def test_weights_that_did_not_move_give_numbers():
    fit = fit_rank1(torch.zeros(3, 3), [1, 2, 3])
    assert all(math.isfinite(x) for x in fit[:3]) and fit.per_step.isfinite().all()


class Drift(nn.Module):
    """A weight that moves by `pace` a step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.other = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.pace = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def run(monitor, model, steps):
    state = SimpleNamespace(global_step=0, log_history=[{"loss": 1.0}])
    monitor.on_train_begin(None, state, None, model=model)
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            model.weight += model.pace
        state.global_step = step
        monitor.on_step_end(None, state, None, model=model)
        logs = {"loss": 1.0}
        monitor.on_log(None, state, None, logs)
        seen.append({k: v for k, v in logs.items() if k != "loss"})
    return seen


def test_the_monitor_logs_and_changes_nothing():
    model = Drift()
    seen = run(Rank1Monitor(every=2, window=3), model, 8)
    torch.testing.assert_close(model.weight.detach(), 8 * model.pace)
    assert seen[4] == {} and seen[-1]["lowrank/rank1_share"] == pytest.approx(1, abs=1e-3)
    assert seen[-1]["lowrank/rank1_r2"] > 0.999 and seen[-1]["lowrank/rank1_alignment"] > 0.999


def test_lora_factors_are_watched_and_the_trunk_is_not(model, lora):
    adapted = get_peft_model(model, lora)
    factors = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    monitor = Rank1Monitor(every=1, window=3, modules="q_proj", extrapolate=True, check=lambda m: 0.0, ahead=5)
    state = SimpleNamespace(global_step=0, log_history=[])
    monitor.on_train_begin(None, state, None, model=adapted)
    paces = {name: torch.randn_like(p) for name, p in factors.items()}
    for state.global_step in range(1, 4):
        with torch.no_grad():
            for name, p in factors.items():
                p += paces[name]
        monitor.on_step_end(None, state, None, model=adapted)
    assert monitor.accepted == 1
    for name, p in adapted.named_parameters():
        steps = 0 if name not in factors else 8 if "q_proj" in name else 3
        expected = before[name] + steps * paces[name] if steps else before[name]
        torch.testing.assert_close(p.detach(), expected, rtol=0.02, atol=0.05)


def test_a_step_along_the_line_is_kept_when_the_score_rises():
    model = Drift()
    monitor = Rank1Monitor(
        every=1, window=4, extrapolate=True, ahead=10, check=lambda m: float((m.weight * m.pace).sum())
    )
    seen = run(monitor, model, 4)
    torch.testing.assert_close(model.weight.detach(), 14 * model.pace, rtol=0.02, atol=0.02)
    assert (seen[-1]["lowrank/rank1_kept"], seen[-1]["lowrank/rank1_taken_back"]) == (1, 0)


@pytest.mark.parametrize("score", [lambda m: -float(m.weight.norm()), lambda m: float("nan")])
def test_a_step_along_the_line_is_taken_back_exactly_when_the_score_falls_and_training_goes_on(score):
    model = Drift()
    model.train()
    monitor = Rank1Monitor(every=1, window=4, extrapolate=True, ahead=10, check=lambda m: score(m.eval()))
    expected = sum([model.pace] * 6, torch.zeros(8, 8))
    run(monitor, model, 6)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-6)
    assert (monitor.accepted, monitor.rejected) == (0, 1) and model.training


def test_a_path_that_does_not_move_evenly_is_not_extrapolated():
    model = Drift()
    model.pace = torch.zeros(8, 8)
    monitor = Rank1Monitor(every=1, window=4, extrapolate=True, check=lambda m: pytest.fail("must not be asked"))
    run(monitor, model, 6)
    assert (monitor.accepted, monitor.rejected) == (0, 0)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"^window, every: found 2, 10"):
        Rank1Monitor(window=2)
    with pytest.raises(ValueError, match=r"^extrapolate needs `check`"):
        Rank1Monitor(extrapolate=True)
    with pytest.raises(ValueError, match=r"^modules: no trainable matrix has 'other'"):
        Rank1Monitor(modules="other").on_train_begin(None, None, None, model=Drift())
