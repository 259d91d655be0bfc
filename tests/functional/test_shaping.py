import json

import pytest

from trl_alpharl.functional.shaping import SHAPING_SCHEDULES, SuccessRate, shaping_weight


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_over_the_run_fall_from_the_start_to_zero(schedule):
    weights = [shaping_weight(schedule, 0.7, success=0.4, progress=step / 10) for step in range(11)]
    assert weights[0] == pytest.approx(0.7) and weights[-1] == pytest.approx(0)
    assert weights[5] == pytest.approx(0.35)
    assert weights == sorted(weights, reverse=True)


def test_the_success_schedule_fades_as_the_policy_succeeds():
    assert [shaping_weight("success", 2.0, rate, progress=0.9) for rate in (0.0, 0.5, 1.0)] == [2.0, 1.0, 0.0]


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="shaping_schedule: found 'step', must be one of success, linear, cosine"):
        shaping_weight("step", 1.0, 0.0, 0.0)
    assert list(SHAPING_SCHEDULES) == ["success", "linear", "cosine"]


def test_success_rate_is_an_exponential_average():
    rate = SuccessRate(decay=0.9)
    for outcome in (1.0, 1.0, 0.0):
        rate.update(outcome)
    assert rate.rate == pytest.approx((1 - 0.9**2) * 0.9)
    resumed = SuccessRate(decay=0.9)
    resumed.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    resumed.update(1.0)
    rate.update(1.0)
    assert resumed.rate == rate.rate
