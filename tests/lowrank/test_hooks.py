"""Hooks go when their optimizer is done."""

import gc

import pytest

from trl_alpharl.lowrank.optimizer import LowRankAdamW

FIXED = {"refresh": "random", "update_gap": 0}


def test_a_second_optimizer_takes_over_and_the_first_one_says_so(network, exact, train, backward):
    model = network()
    first = LowRankAdamW(model.parameters(), config=exact())
    second = LowRankAdamW(model.parameters(), config=exact())
    train(model, second, [0])
    with pytest.raises(RuntimeError, match=r"^another LowRankAdamW was made for these parameters"):
        first.step()


@pytest.mark.parametrize("how", ["deleted", "released"])
def test_an_optimizer_that_is_done_leaves_gradients_alone(network, exact, train, backward, how):
    """Else a model that goes on under another optimizer would not learn, without an error."""
    model = network()
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    train(model, optimizer, [0])
    if how == "deleted":
        del optimizer
        gc.collect()
    else:
        optimizer.taker.release()
    backward(model, 1)
    assert model.first.weight.grad is not None
    if how == "released":
        model.zero_grad()
        optimizer.taker.attach()
        backward(model, 1)
        assert model.first.weight.grad is None
