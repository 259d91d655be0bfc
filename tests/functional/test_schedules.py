import math

import pytest

from trl_alpharl.functional.schedules import AdaptiveKLController, FixedKLController


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1 + 0.1 * 0.5), (5.4, 1 - 0.1 * 0.5), (60.0, 1 + 0.2 * 0.5), (-3.0, 1 - 0.2 * 0.5)],
)
def test_one_update_by_hand(kl, factor):
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100)
    controller.update(kl, episodes=50)
    assert controller.kl_coef == pytest.approx(0.2 * factor)


def test_holds_a_kl_that_answers_to_the_coefficient():
    controller = AdaptiveKLController(0.05, target=6.0, horizon=400)
    kls = []
    for _ in range(200):
        kls.append(1.2 / controller.kl_coef)  # a policy that drifts less the more it pays
        controller.update(kls[-1], episodes=64)
    assert kls[0] == pytest.approx(24) and kls[-1] == pytest.approx(6, rel=1e-3)


def test_state_resumes_exactly_under_the_target_of_the_new_configuration():
    first = AdaptiveKLController(0.05, target=6.0, horizon=100)
    first.update(9.0, 10)
    resumed = AdaptiveKLController(0.3, target=3.0, horizon=100)
    resumed.load_state_dict(first.state_dict())
    assert resumed.kl_coef == first.kl_coef
    resumed.update(3.0, 10)
    assert resumed.kl_coef == first.kl_coef  # 3 is its own target


def test_the_fixed_controller_never_moves_and_keeps_the_configured_value_on_resume():
    controller = FixedKLController(0.05)
    controller.update(kl=1e9, episodes=64)
    controller.load_state_dict(AdaptiveKLController(0.7, 6.0, 100).state_dict())
    assert controller.kl_coef == 0.05
    AdaptiveKLController(0.7, 6.0, 100).load_state_dict(controller.state_dict())


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "0.1", True, None])
@pytest.mark.parametrize("make", [FixedKLController, lambda x: AdaptiveKLController(x, 6.0, 100)])
def test_refuses_a_wrong_coefficient(make, bad):
    with pytest.raises(ValueError, match=r"^kl_coef: found .*, must be a finite number >=? 0$"):
        make(bad)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0.0, 6.0, 100), "kl_coef"), ((0.1, 0.0, 100), "kl_target"), ((0.1, 6.0, -1), "kl_horizon")],
)
def test_refuses_what_would_stand_still_or_divide_by_zero(arguments, field):
    with pytest.raises(ValueError, match=f"^{field}: found .*, must be a finite number > 0$"):
        AdaptiveKLController(*arguments)


def test_refuses_a_rollout_that_could_turn_the_coefficient_negative():
    controller = AdaptiveKLController(0.1, target=6.0, horizon=10)
    controller.update(kl=0.0, episodes=49)
    assert controller.kl_coef > 0
    with pytest.raises(ValueError, match=r"^kl_horizon: found 10 for 50 episodes a rollout"):
        controller.update(kl=0.0, episodes=50)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_refuses_a_kl_that_is_not_finite_and_stays_as_it_was(kl):
    controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    with pytest.raises(ValueError, match=r"^kl: found"):
        controller.update(kl, 8)
    assert controller.kl_coef == 0.1


@pytest.mark.parametrize("make", [lambda: FixedKLController(0.1), lambda: AdaptiveKLController(0.1, 6.0, 100)])
@pytest.mark.parametrize("state", [{}, {"kl_coef": math.nan}, {"kl_coef": 0.1, "beta": 1.0}, {"kl_coef": "x"}])
def test_refuses_a_state_of_another_form(make, state):
    with pytest.raises(ValueError, match="kl_coef"):
        make().load_state_dict(state)
