import json

import pytest

from trl_alpharl.functional.gates import UpdateGate, gradient_surges, kl_stops


def test_the_first_epoch_never_stops():
    assert not kl_stops(1e9, limit=0.008, epoch=0)
    assert not gradient_surges(1e9, usual=1.0, factor=2.0, epoch=0)


def test_a_rule_of_zero_never_fires():
    gate = UpdateGate()
    assert all(gate.admit(epoch, kl=1e9, head_gradient=10.0**epoch) for epoch in range(5))
    assert gate.open


def test_a_kl_stop_admits_the_step_that_showed_it_and_closes():
    gate = UpdateGate(kl_limit=0.01)
    for epoch, kl, still_open in [(0, 0.5, True), (1, 0.01, True), (1, 0.02, False), (2, 0.0, False)]:
        assert gate.admit(epoch, kl=kl)
        assert gate.open is still_open


def test_a_surge_drops_the_step_and_closes():
    gate = UpdateGate(surge_factor=2.0)
    assert gate.admit(0, head_gradient=1.0) and gate.admit(0, head_gradient=3.0)  # usual: 2
    assert gate.admit(1, head_gradient=4.0) and gate.open
    assert not gate.admit(1, head_gradient=4.1) and not gate.open
    gate.new_rollout()
    assert gate.open and gate.admit(0, head_gradient=100.0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_state_goes_on_inside_a_rollout(cut):
    steps = [(0, 0.0, 1.0), (0, 0.0, 3.0), (1, 0.0, 4.1), (1, 0.0, 1.0)]
    straight = UpdateGate(kl_limit=0.01, surge_factor=2.0)
    expected = [straight.admit(*step) for step in steps]
    first, second = UpdateGate(0.01, 2.0), UpdateGate(0.01, 2.0)
    found = [first.admit(*step) for step in steps[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.admit(*step) for step in steps[cut:]]
    assert found == expected == [True, True, False, True]
    assert second.state_dict() == straight.state_dict()
