import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.functional.advantages import (
    compute_gae,
    compute_gae_with_entropy,
    explained_variance,
    explained_variance_from_moments,
    mean_baseline_advantages,
)
from trl_alpharl.functional.masking import masked_moments, merge_moments


def gae_by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """One completion: every advantage as its own weighted sum of the temporal differences that follow it."""
    future = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, future)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[start:])) for start in range(len(deltas))]


@st.composite
def completions(draw):
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    number = st.floats(-5, 5, width=32)
    rows = [draw(st.lists(number, min_size=2 * n, max_size=2 * n)) for n in lengths]
    return [(row[: len(row) // 2], row[len(row) // 2 :]) for row in rows]


@settings(max_examples=60, deadline=None)
@given(completions(), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 1e3, float("nan"), float("inf")]))
def test_gae_equals_its_definition_row_by_row(rows, gamma, lam, garbage):
    width = max(len(rewards) for rewards, _ in rows) + 2
    mask = torch.tensor([[t < len(rewards) for t in range(width)] for rewards, _ in rows])
    rewards, values = (
        torch.tensor([[*row[part], *[garbage] * (width - len(row[part]))] for row in rows]) for part in (0, 1)
    )
    advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float32
    for i, (row_rewards, row_values) in enumerate(rows):
        expected = gae_by_definition(row_rewards, row_values, gamma, lam)
        assert advantages[i, : len(expected)].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
        targets = [a + v for a, v in zip(expected, row_values)]
        assert returns[i, : len(expected)].tolist() == pytest.approx(targets, rel=1e-4, abs=1e-4)
    assert torch.all(advantages[~mask] == 0) and torch.all(returns[~mask] == 0)


@pytest.mark.parametrize("past_the_end", [1e3, float("nan")])
def test_case_7_values_past_the_end_change_nothing(past_the_end):
    mask = torch.arange(6) < torch.tensor([[1], [2], [6]])
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)
    expected = compute_gae(rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0), mask, 0.99, 0.95)
    found = compute_gae(rewards, values.masked_fill(~mask, past_the_end), mask, 0.99, 0.95)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_lambda_1_returns_are_discounted_rewards_and_lambda_0_one_step_targets():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.3, 0.2, 0.1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert compute_gae(rewards, values, mask, 0.5, 1.0)[1].tolist() == [pytest.approx([3.0, 4.0, 4.0])]
    assert compute_gae(rewards, values, mask, 0.5, 0.0)[1].tolist() == [pytest.approx([1.1, 2.05, 4.0])]


@pytest.mark.parametrize("row", [[False, True, True], [True, False, True]])
def test_a_mask_that_is_not_right_padded_is_refused(row):
    mask = torch.tensor([[True, True, False], row])
    with pytest.raises(ValueError, match=r"completion_mask: row 1 .* padded on the right"):
        compute_gae(torch.zeros(2, 3), torch.zeros(2, 3), mask, 1.0, 1.0)


def test_explained_variance_of_known_critics():
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(returns, returns + 5).item() == 1  # a constant offset has no variance
    assert explained_variance(returns, torch.full((4,), 3.0)).item() == 0
    assert explained_variance(returns, -returns).item() == pytest.approx(-3)
    noise = torch.tensor([0.5, -0.5, 0.5, -0.5])  # variance 0.25 of a total 3.5
    assert explained_variance(returns, returns + noise).item() == pytest.approx(1 - 0.25 / 3.5)


def test_explained_variance_ignores_padding():
    returns, values = torch.tensor([1.0, 2.0, 3.0, 1e3]), torch.tensor([1.0, 2.0, 2.0, float("nan")])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, values, mask) == explained_variance(returns[:3], values[:3])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_explained_variance_of_constant_returns_is_zero(value):
    returns = torch.full((7,), value)
    assert explained_variance(returns, torch.arange(7.0)).item() == 0
    rounded = returns.clone()
    rounded[3] *= 1 + 2**-23  # the last bit of an fp32 sum is no variance either
    assert explained_variance(rounded, torch.arange(7.0)).item() == 0
    assert explained_variance(returns[:0], returns[:0]).item() == 0


def test_explained_variance_does_not_hide_a_nan():
    assert explained_variance(torch.tensor([1.0, float("nan")]), torch.zeros(2)).isnan()


def test_explained_variance_of_merged_processes_is_that_of_the_union():
    generator = torch.Generator().manual_seed(1)
    returns, values = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    keep = torch.ones(3, dtype=torch.bool)
    halves = [slice(0, 3), slice(3, 6)]
    errors = merge_moments(torch.stack([masked_moments((returns - values)[half], keep) for half in halves]))
    targets = merge_moments(torch.stack([masked_moments(returns[half], keep) for half in halves]))
    exact = 1 - ((returns - values).double().var() / returns.double().var())
    assert explained_variance_from_moments(errors, targets).item() == pytest.approx(exact.item(), rel=1e-6)


def test_entropy_rewards_enter_before_the_scan():
    generator = torch.Generator().manual_seed(2)
    rewards, values, entropies = (torch.randn(3, 4, generator=generator) for _ in range(3))
    mask = torch.arange(4) < torch.tensor([[4], [2], [0]])
    dirty = entropies.masked_fill(~mask, float("nan"))
    found = compute_gae_with_entropy(rewards, values, dirty, mask, 0.9, 0.8, 0.3)
    for row, length in enumerate([4, 2, 0]):
        augmented = [float(r) + 0.3 * float(h) for r, h in zip(rewards[row, :length], entropies[row, :length])]
        expected = gae_by_definition(augmented, values[row, :length].tolist(), 0.9, 0.8)
        assert found[0][row, :length].tolist() == pytest.approx(expected, abs=1e-5)
    plain = compute_gae(rewards, values, mask, 0.9, 0.8)
    assert all(
        torch.equal(a, b) for a, b in zip(compute_gae_with_entropy(rewards, values, dirty, mask, 0.9, 0.8, 0.0), plain)
    )


def test_mean_baseline_advantages_sum_to_zero_and_keep_the_order():
    returns = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
    mask = torch.tensor([[True, True], [True, False]])
    found = mean_baseline_advantages(returns, mask, torch.tensor(3.0))
    assert found.tolist() == [[-2.0, -1.0], [3.0, 0.0]]
