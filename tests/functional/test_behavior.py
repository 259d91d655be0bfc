import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.functional.behavior import annealed, behavior_log_probs, staged_noise


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 3), st.floats(0, 0.9), st.floats(0.05, 1), st.booleans())
def test_it_is_the_mixture_that_it_says(seed, temperature, epsilon, top_p, noisy):
    """In fp64 and token by token, with the top-p set found by adding the likeliest tokens one by one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 7, generator=generator) * 3
    noise = torch.randn(3, 7, generator=generator) if noisy else None
    mu = behavior_log_probs(logits, temperature, noise, epsilon, top_p).double().exp()
    pi = (logits.double() / temperature + (0 if noise is None else noise.double())).softmax(-1)
    for row in range(3):
        inside, total = set(), 0.0
        for token in sorted(range(7), key=lambda t: -float(pi[row, t])):
            if total >= top_p and top_p < 1:
                break
            inside.add(token)
            total += float(pi[row, token])
        for token in range(7):
            uniform = 1 / len(inside) if token in inside else 0.0
            expected = (1 - epsilon) * float(pi[row, token]) + epsilon * uniform
            assert float(mu[row, token]) == pytest.approx(expected, abs=1e-5)
    assert mu.sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_without_exploration_it_is_the_policy_bit_for_bit():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(behavior_log_probs(logits, 0.7), torch.log_softmax(logits / 0.7, -1))


def test_anneal_reaches_zero_and_stays():
    assert [annealed(0.2, 0.5, p) for p in (0, 0.25, 0.5, 0.9)] == pytest.approx([0.2, 0.1, 0, 0])
    assert annealed(0.2, 0.0, 0.9) == 0.2


def test_noise_falls_in_ten_equal_ratios():
    levels = [staged_noise(1e-2, 1e-4, stage / 10 + 0.05) for stage in range(10)]
    ratios = [after / before for before, after in itertools.pairwise(levels)]
    assert levels[0] == pytest.approx(1e-2) and levels[-1] == pytest.approx(1e-4)
    assert ratios == pytest.approx([100 ** (-1 / 9)] * 9)
    assert staged_noise(0.0, 1e-4, 0.3) == 0.0
