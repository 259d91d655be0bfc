import pytest
import torch

from trl_alpharl.functional.advantages import compute_gae
from trl_alpharl.functional.lambdas import length_adaptive_lambda, scheduled_lambda


def test_the_schedule_is_a_straight_line():
    assert [scheduled_lambda(0.95, 0.85, p) for p in (0, 0.25, 1)] == pytest.approx([0.95, 0.925, 0.85])


def test_the_sum_of_gae_s_weights_is_the_scaled_length():
    """VAPO's rule: sum over t of lambda^t = 1 / (1 - lambda) = scale x length."""
    lengths = torch.tensor([40, 200, 5000])
    lams = length_adaptive_lambda(lengths, scale=0.05)
    sums = [sum(float(lam) ** t for t in range(100_000)) for lam in lams]
    assert sums == pytest.approx((0.05 * lengths).tolist(), rel=1e-3)


def test_short_and_empty_completions_get_lambda_zero():
    assert length_adaptive_lambda(torch.tensor([0, 1, 20]), scale=0.05).tolist() == [0, 0, 0]


def test_gae_takes_one_lambda_a_row():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, generator=generator), torch.randn(2, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    lams = torch.tensor([0.3, 0.9])
    together = compute_gae(rewards, values, mask, 0.99, lams)
    for row, lam in enumerate(lams.tolist()):
        alone = compute_gae(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 0.99, lam)
        for found, expected in zip(together, alone):
            torch.testing.assert_close(found[row : row + 1], expected)
