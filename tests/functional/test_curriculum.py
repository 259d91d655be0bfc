from collections import Counter

import pytest
import torch

from trl_alpharl.functional.curriculum import draw_rows, intermediate, success_weights, updated_success


def test_the_target_weighs_most_and_both_sides_alike():
    weights = success_weights(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), target=0.5, width=0.25)
    assert weights[2] == 1 and weights.argmax() == 2
    torch.testing.assert_close(weights, weights.flip(0))
    assert float(weights[1]) == pytest.approx(2.718281828**-0.5)


def test_draws_are_in_proportion_to_the_weights():
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([1.0, 3.0, 6.0])
    counts = Counter(draw_rows(weights, 1, generator)[0] for _ in range(4000))
    shares = [counts[row] / 4000 for row in range(3)]
    assert shares == pytest.approx([0.1, 0.3, 0.6], abs=0.03)


def test_no_row_comes_twice_before_every_row_came():
    rows = draw_rows(torch.tensor([1.0, 1e-3, 5.0]), 7, torch.Generator().manual_seed(1))
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2] and len(rows) == 7


def test_success_is_a_mean_with_a_prior_and_then_follows_the_policy():
    success, outcomes = 0.5, [1.0, 1.0, 0.0]
    for tries, outcome in enumerate(outcomes):
        success = updated_success(success, tries, outcome)
    assert success == pytest.approx((0.5 + sum(outcomes)) / 4)
    for tries in range(100, 120):
        success = updated_success(success, tries, 0.0)
    assert success < 0.01


def test_intermediate_prompts_are_neither_always_nor_never_solved():
    outcomes = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    assert intermediate(outcomes).tolist() == [False, True, True, False]
