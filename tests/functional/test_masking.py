import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.functional.masking import (
    masked_mean,
    masked_moments,
    masked_sum,
    merge_moments,
    score_positions,
    whiten,
)

VALUES = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e3]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_sum_and_mean_ignore_what_the_mask_hides(garbage):
    values = VALUES.masked_fill(~MASK, garbage)
    assert masked_sum(values, MASK).item() == 13
    assert masked_mean(values, MASK).item() == 13 / 4
    assert masked_sum(values, MASK, dim=1).tolist() == [9, 4, 0]
    assert masked_mean(values, MASK, dim=1).tolist() == [3, 4, 0]
    assert masked_mean(values, MASK, dim=0).tolist() == [2.5, 2, 6]


def test_mean_of_nothing_is_zero():
    assert masked_mean(VALUES, torch.zeros_like(MASK)).item() == 0


@pytest.mark.parametrize("garbage", GARBAGE)
def test_hidden_garbage_gets_a_gradient_of_exactly_zero(garbage):
    values = VALUES.masked_fill(~MASK, garbage).requires_grad_()
    masked_mean(values, MASK).backward()
    assert torch.equal(values.grad, MASK.float() / 4)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_moments_are_count_mean_and_squared_deviations(garbage):
    moments = masked_moments(VALUES.masked_fill(~MASK, garbage), MASK)
    kept = [1.0, 2.0, 6.0, 4.0]
    assert moments.dtype == torch.float64
    assert moments.tolist() == pytest.approx([4, 3.25, sum((x - 3.25) ** 2 for x in kept)])


def test_moments_keep_a_small_spread_on_a_large_offset():
    values = torch.tensor([1e6, 1e6 + 0.25, 1e6 + 0.5])
    assert masked_moments(values, torch.ones(3, dtype=torch.bool))[2].item() == pytest.approx(0.125, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=6), min_size=1, max_size=5))
def test_merged_moments_are_those_of_the_union(parts):
    stacked = [masked_moments(torch.tensor(part), torch.ones(len(part), dtype=torch.bool)) for part in parts]
    merged = merge_moments(torch.stack(stacked))
    union = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    mean = union.mean() if len(union) else torch.tensor(0.0)
    assert merged[0] == len(union)
    assert torch.allclose(merged[1], mean.double(), rtol=1e-10, atol=1e-10)
    assert torch.allclose(merged[2], (union - mean).square().sum().double(), rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_whitened_values_have_mean_0_and_unbiased_variance_1(garbage):
    values = VALUES.masked_fill(~MASK, garbage)
    whitened = whiten(values, MASK, masked_moments(values, MASK))
    assert whitened.dtype == torch.float32
    assert torch.all(whitened[~MASK] == 0)
    assert whitened[MASK].mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened[MASK].var(unbiased=True).item() == pytest.approx(1, abs=1e-5)


def test_whiten_can_keep_the_mean():
    moments = masked_moments(VALUES, MASK)
    kept = whiten(VALUES, MASK, moments, shift_mean=False)
    assert kept[MASK].mean().item() == pytest.approx(3.25)
    assert torch.allclose(kept[MASK] - 3.25, whiten(VALUES, MASK, moments)[MASK], atol=1e-6)
    assert torch.all(kept[~MASK] == 0)


def test_whiten_over_two_processes_equals_one():
    mine, other = VALUES[:1], VALUES[1:]
    moments = merge_moments(torch.stack([masked_moments(mine, MASK[:1]), masked_moments(other, MASK[1:])]))
    whole = whiten(VALUES, MASK, masked_moments(VALUES, MASK))
    assert torch.allclose(torch.cat([whiten(mine, MASK[:1], moments), whiten(other, MASK[1:], moments)]), whole)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_of_fewer_than_two_values_is_finite(count, shift_mean):
    mask = torch.arange(3) < count
    values = torch.tensor([5.0, 1e3, 1e3])
    expected = [5.0 * count * (not shift_mean), 0, 0]
    assert whiten(values, mask, masked_moments(values, mask), shift_mean).tolist() == expected


def test_score_position_is_the_last_token_that_counts():
    assert score_positions(MASK).tolist() == [2, 0, -1]
    assert score_positions(torch.tensor([[False, True, False, True, False]])).tolist() == [3]  # left padding, a gap
    assert score_positions(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]
    assert score_positions(MASK).dtype == torch.long
