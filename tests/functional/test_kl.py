import pytest
import torch

from trl_alpharl.functional.kl import KL_ESTIMATORS, per_token_kl

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
EXACT = (POLICY * (POLICY / REFERENCE).log()).sum()

every_estimator = pytest.mark.parametrize("estimator", KL_ESTIMATORS)


@every_estimator
def test_is_exactly_zero_where_the_models_agree(estimator):
    logps = torch.tensor([-0.1, -3.0, -40.0])
    assert per_token_kl(logps, logps.clone(), estimator).tolist() == [0, 0, 0]


@every_estimator
def test_keeps_shape_and_dtype(estimator):
    kl = per_token_kl(torch.zeros(2, 3), torch.ones(2, 3), estimator)
    assert kl.shape == (2, 3) and kl.dtype == torch.float32


@every_estimator
def test_agrees_with_half_the_squared_log_ratio_near_zero_in_the_mean(estimator):
    # All three have the same expectation to second order: compare with the exact KL of two close distributions.
    close = (POLICY.log() + torch.tensor([1e-4, -2e-4, 3e-4], dtype=torch.float64)).softmax(0)
    exact = (POLICY * (POLICY / close).log()).sum()
    assert (POLICY * per_token_kl(POLICY.log(), close.log(), estimator)).sum() == pytest.approx(exact.item(), rel=1e-3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(estimator):
    ratios = torch.cat([torch.linspace(-1e-3, 1e-3, 20_001), torch.linspace(-80, 80, 20_001)])
    assert per_token_kl(torch.zeros_like(ratios), ratios, estimator).min() >= 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_expectation(estimator):
    expectation = (POLICY * per_token_kl(POLICY.log(), REFERENCE.log(), estimator)).sum()
    assert expectation.item() == pytest.approx(EXACT.item(), rel=1e-12)


def test_the_expected_gradient_of_k2_is_the_gradient_of_the_kl():
    logits = POLICY.log().clone().requires_grad_()
    exact = (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE.log())).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    estimate = (POLICY * per_token_kl(logits.log_softmax(0), REFERENCE.log(), "k2")).sum()
    (found,) = torch.autograd.grad(estimate, logits)
    assert torch.allclose(found, wanted, rtol=1e-12)


def test_hand_values():
    logps, ref_logps = torch.tensor([-1.0]), torch.tensor([-3.0])  # log ratio -2
    values = {name: per_token_kl(logps, ref_logps, name).item() for name in KL_ESTIMATORS}
    assert values == pytest.approx({"k1": 2.0, "k2": 2.0, "k3": 1.1353352832})


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ValueError, match=r"kl_estimator: found 'k4', must be one of k1, k2, k3"):
        per_token_kl(torch.zeros(1), torch.zeros(1), "k4")
