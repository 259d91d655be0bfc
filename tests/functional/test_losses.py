import math

import pytest
import torch

from trl_alpharl.functional.losses import (
    clipped_surrogate_loss,
    clipped_value_loss,
    entropy_bonus,
    positive_nll_loss,
)

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e3]
LOW, HIGH = 0.2, 0.3


def surrogate_by_hand(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token and its derivative by the log-prob, by cases instead of by max()."""
    if advantage > 0 and ratio > 1 + HIGH:
        return -advantage * (1 + HIGH), 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -advantage * (1 - LOW), 0.0
    return -advantage * ratio, -advantage * ratio


RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.25, 2.0], [0.5, 0.9, 1.0, 1.25, 2.0]])
ADVANTAGES = torch.tensor([[2.0] * 5, [-2.0] * 5])
ALL = torch.ones(2, 5, dtype=torch.bool)


def test_surrogate_loss_statistics_and_gradient_by_cases():
    logps = RATIOS.log().requires_grad_()
    result = clipped_surrogate_loss(logps, torch.zeros(2, 5), ADVANTAGES, ALL, LOW, HIGH, normalizer=4)
    result.loss.backward()
    cases = [surrogate_by_hand(r, a) for r, a in zip(RATIOS.flatten().tolist(), ADVANTAGES.flatten().tolist())]
    assert result.loss.item() == pytest.approx(sum(loss for loss, _ in cases) / 4)
    assert logps.grad.flatten().tolist() == pytest.approx([slope / 4 for _, slope in cases])
    assert result.ratio_sum.item() == pytest.approx(2 * 5.65)
    assert result.clipped_count.item() == 2
    assert result.approx_kl_sum.item() == pytest.approx(sum(math.log(r) ** 2 for r in RATIOS.flatten().tolist()) / 2)
    assert not any(x.requires_grad for x in result[1:])


def test_an_unchanged_policy_has_ratio_1_kl_0_and_the_plain_policy_gradient():
    old = torch.tensor([[-1.5, -0.3]])
    logps = old.clone().requires_grad_()
    advantages = torch.tensor([[1.0, -3.0]])
    result = clipped_surrogate_loss(logps, old, advantages, ALL[:1, :2], LOW, HIGH, normalizer=2)
    result.loss.backward()
    assert (result.ratio_sum.item(), result.clipped_count.item(), result.approx_kl_sum.item()) == (2, 0, 0)
    assert torch.equal(logps.grad, -advantages / 2)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_padding_gives_the_surrogate_exactly_no_loss_and_no_gradient(garbage):
    mask = torch.tensor([[True, True, False, False]])
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 4, generator=generator) for _ in range(4)]
    logps, old, advantages, weights = (x.masked_fill(~mask, garbage) for x in tensors)
    logps.requires_grad_()
    result = clipped_surrogate_loss(logps, old, advantages, mask, LOW, HIGH, 2, weights)
    result.loss.backward()
    real = [x[:, :2] for x in tensors]
    alone = clipped_surrogate_loss(*real[:3], mask[:, :2], LOW, HIGH, 2, real[3])
    assert all(torch.equal(a, b) for a, b in zip(result, alone))
    assert torch.all(logps.grad[:, 2:] == 0) and torch.all(logps.grad[:, :2].isfinite())


def test_weights_scale_the_loss_of_their_token_and_no_statistic():
    weights = torch.tensor([[0.0, 2.0]])
    logps = torch.zeros(1, 2, requires_grad=True)
    arguments = (logps, torch.zeros(1, 2), torch.ones(1, 2), ALL[:1, :2], LOW, HIGH, 1)
    plain, weighted = clipped_surrogate_loss(*arguments), clipped_surrogate_loss(*arguments, weights=weights)
    weighted.loss.backward()
    assert (plain.loss.item(), weighted.loss.item()) == (-2, -2)
    assert logps.grad.tolist() == [[0, -2]]
    assert plain[1:] == weighted[1:]


def value_loss_by_hand(value: float, old: float, target: float, cliprange: float) -> tuple[float, bool]:
    held = min(max(value, old - cliprange), old + cliprange)
    worse = (held - target) ** 2 > (value - target) ** 2
    return 0.5 * ((held if worse else value) - target) ** 2, worse


def test_value_loss_by_cases():
    values = torch.tensor([[0.1, 1.0, 1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.zeros(1, 5)
    targets = torch.tensor([[5.0, 1.0, -1.0, -1.0, 1.0]])
    result = clipped_value_loss(values, old, targets, ALL[:1], 0.2, normalizer=2)
    result.loss.backward()
    cases = [value_loss_by_hand(v, 0.0, t, 0.2) for v, t in zip(values[0].tolist(), targets[0].tolist())]
    assert result.loss.item() == pytest.approx(sum(loss for loss, _ in cases) / 2)
    assert result.clipped_count.item() == sum(worse for _, worse in cases) == 2
    # Toward a far target the step is free, past the range it is not: no gradient where the held value is the worse.
    assert values.grad[0].tolist() == pytest.approx([-2.45, 0, 1.0, 0, -1.0])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_padding_gives_the_value_loss_exactly_nothing(garbage):
    mask = torch.tensor([[True, False, False]])
    values, old, returns = (torch.full((1, 3), x).masked_fill(~mask, garbage) for x in (1.0, 2.0, 3.0))
    values.requires_grad_()
    result = clipped_value_loss(values, old, returns, mask, 10.0, normalizer=1)
    result.loss.backward()
    assert (result.loss.item(), result.clipped_count.item()) == (2, 0)
    assert values.grad.tolist() == [[-2, 0, 0]]


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0)])
def test_a_mini_batch_of_empty_completions_has_loss_0(normalizer):
    x, nothing = torch.ones(1, 2, requires_grad=True), torch.zeros(1, 2, dtype=torch.bool)
    policy = clipped_surrogate_loss(x, x, x, nothing, LOW, HIGH, normalizer).loss
    value = clipped_value_loss(x, x, x, nothing, 0.2, normalizer).loss
    (policy + value).backward()
    assert (policy.item(), value.item(), x.grad.tolist()) == (0, 0, [[0, 0]])


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0, 1], [2]]])
def test_chunks_of_a_mini_batch_add_up_however_rows_are_grouped(groups):
    mask = torch.arange(5) < torch.tensor([[1], [5], [2], [3]])
    generator = torch.Generator().manual_seed(2)
    logps, old, advantages = (torch.randn(4, 5, generator=generator) for _ in range(3))
    logps.requires_grad_()
    parts = [
        clipped_surrogate_loss(logps[g], old[g], advantages[g], mask[g], LOW, HIGH, mask.sum())
        for g in map(torch.tensor, groups)
    ]
    sum(part.loss for part in parts).backward()
    ratio = (logps - old).exp()
    mean = -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - LOW, 1 + HIGH))[mask].mean()
    assert sum(part.loss for part in parts).item() == pytest.approx(mean.item(), rel=1e-6)
    assert torch.allclose(logps.grad, torch.autograd.grad(mean, logps)[0], atol=1e-7)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_positive_nll_counts_the_tokens_of_successes_alone(garbage):
    logps = torch.tensor([[-1.0, -2.0], [-4.0, garbage], [-8.0, garbage]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    loss = positive_nll_loss(logps, mask, torch.tensor([True, False, True]), normalizer=4)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 8) / 4)
    assert logps.grad.tolist() == [[-0.25, -0.25], [0.0, 0.0], [-0.25, 0.0]]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_entropy_bonus_is_a_mean_over_the_mini_batch(garbage):
    entropies = torch.tensor([[1.0, 2.0], [4.0, garbage]], requires_grad=True)
    bonus = entropy_bonus(entropies, torch.tensor([[True, True], [True, False]]), normalizer=5)
    bonus.backward()
    assert bonus.item() == pytest.approx(7 / 5)
    assert entropies.grad.tolist() == [[pytest.approx(0.2)] * 2, [pytest.approx(0.2), 0.0]]


def test_a_mini_batch_without_tokens_has_no_extra_losses():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert positive_nll_loss(torch.ones(1, 2), nothing, torch.tensor([True]), normalizer=0) == 0
    assert entropy_bonus(torch.ones(1, 2), nothing, normalizer=0) == 0
