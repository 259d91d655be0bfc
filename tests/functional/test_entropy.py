import json

import pytest
import torch

from trl_alpharl.functional.entropy import EntropyDual, EntropyPI, FixedEntropy, entropy_target

LIMITS = (-0.5, 0.5)


def controllers():
    return {
        "dual": EntropyDual(0.0, rate=0.02, limits=LIMITS, start=0.8, end=0.3),
        "pi": EntropyPI(0.0, kp=0.5, ki=0.05, limits=LIMITS, start=0.8, end=0.3),
    }


def softmax_policy(controller, steps: int = 400, reward: float = 0.2, rate: float = 0.5):
    """A bandit of 20 arms, exact gradients: reward pulls the entropy down, the bonus holds it up. Returns the relative
    distances from the target over the last half of the run."""
    logits = torch.zeros(20, dtype=torch.float64)
    rewards = torch.linspace(0, reward, 20, dtype=torch.float64)
    distances = []
    for step in range(steps):
        logits = logits.detach().requires_grad_()
        probs = logits.softmax(0)
        entropy = -(probs * probs.log()).sum()
        ((probs * rewards).sum() + controller.coef * entropy).backward()
        logits = logits + rate * 20 * logits.grad
        controller.update(float(entropy.detach()), step / steps)
        distances.append(abs(float(entropy.detach()) - controller.target) / controller.target)
    return distances[steps // 2 :]


@pytest.mark.parametrize("name", ["dual", "pi"])
def test_the_entropy_follows_a_falling_target(name):
    assert max(softmax_policy(controllers()[name])) < 0.1


def test_without_control_it_does_not():
    controller = EntropyDual(0.0, rate=0.0, limits=LIMITS, start=0.8, end=0.3)
    assert max(softmax_policy(controller)) > 0.3


def test_target_by_hand():
    assert [entropy_target(2.0, 0.8, 0.3, progress) for progress in (0, 0.5, 1)] == pytest.approx([1.6, 1.1, 0.6])


def test_the_dual_works_both_ways_and_stays_in_its_limits():
    dual = EntropyDual(0.01, rate=0.02, limits=(0.0, 0.05), start=0.8, end=0.8)
    dual.update(2.0, 0.0)
    assert dual.initial == 2.0 and dual.target == pytest.approx(1.6)
    assert dual.coef == pytest.approx(0.01 - 0.02 * 0.2)
    dual.update(1.0, 0.1)
    assert dual.coef == pytest.approx(0.006 + 0.02 * 0.3)
    for _ in range(50):
        dual.update(0.0, 0.2)
    assert dual.coef == 0.05
    for _ in range(500):
        dual.update(2.0, 0.3)
    assert dual.coef == 0.0


def test_anti_windup_lets_the_pi_form_leave_a_limit_at_once():
    pi = EntropyPI(0.0, kp=0.0, ki=0.1, limits=(0.0, 0.05), start=1.0, end=1.0)
    pi.update(1.0, 0.0)
    for _ in range(100):
        pi.update(0.5, 0.0)
    assert pi.coef == 0.05
    pi.update(1.6, 0.0)  # an error of -0.6: without anti-windup the sum of 50 would hold it at the limit
    assert pi.coef < 0.05


@pytest.mark.parametrize("name", ["dual", "pi"])
def test_state_goes_on_bit_for_bit(name):
    straight, resumed = controllers()[name], controllers()[name]
    for entropy in (2.0, 1.5, 1.2):
        straight.update(entropy, 0.1)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for entropy in (1.0, 1.4):
        straight.update(entropy, 0.2)
        resumed.update(entropy, 0.2)
    assert straight.state_dict() == resumed.state_dict()
    assert straight.coef != 0


def test_a_policy_without_entropy_does_not_divide_by_zero():
    dual = controllers()["dual"]
    dual.update(0.0, 0.0)
    assert dual.coef == 0.0


def test_fixed_stays():
    fixed = FixedEntropy(0.02)
    fixed.update(5.0, 0.9)
    fixed.load_state_dict(fixed.state_dict())
    assert fixed.coef == 0.02 and fixed.target is None
