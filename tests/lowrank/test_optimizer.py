"""What must hold of LowRankAdamW, each against an oracle of its own."""

import copy
import io

import pytest
import torch
from torch import nn

from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.matrix import ProjectedMatrix
from trl_alpharl.lowrank.optimizer import LowRankAdamW

FIXED = {"refresh": "random", "update_gap": 0}


@pytest.mark.parametrize("refresh", ["power", "rsvd", "column_sampled", "random"])
def test_four_micro_batches_of_two_are_one_of_eight_across_refreshes(network, exact, backward, weights, refresh):
    """Case 33. `p.grad` of a projected matrix is None throughout, and no two whole gradients exist together."""
    most = 0

    def count_gradients(parameter):
        nonlocal most
        most = max(most, sum(matrix.grad is not None for matrix in (model.first.weight, model.second.weight)))

    found = []
    for parts in (1, 4):
        model = network()
        for matrix in (model.first.weight, model.second.weight):
            matrix.register_post_accumulate_grad_hook(count_gradients)  # runs before the optimizer's
        optimizer = LowRankAdamW(model.parameters(), lr=1e-3, config=exact(refresh=refresh, update_gap=3))
        for step in range(8):
            backward(model, step, parts)
            assert model.first.weight.grad is None and model.second.weight.grad is None
            assert model.last.weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[model.first.weight]["refreshes"] >= 2
        found.append(weights(model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    assert most == 1


def test_clipping_scales_the_whole_gradient_and_returns_the_norm_before(network, exact, backward, train, weights):
    """Case 35."""
    moved = {}
    for limit in (1e-6, 1e6, None):
        model = network()
        start = weights(model)
        optimizer = LowRankAdamW(model.parameters(), lr=1e-2, eps=1e-3, config=exact(), max_grad_norm=limit)
        train(model, optimizer, range(2))
        moved[limit] = weights(model) - start
        assert optimizer.last_norm > 1e-3
    assert moved[1e-6].norm() < 0.01 * moved[1e6].norm()
    assert torch.equal(moved[1e6], moved[None])


def test_clipping_from_outside_equals_clipping_inside(network, exact, backward, train, weights):
    inside, outside = network(), network()
    first = LowRankAdamW(inside.parameters(), config=exact(), max_grad_norm=0.1)
    second = LowRankAdamW(outside.parameters(), config=exact())
    for step in range(3):
        train(inside, first, [step], parts=2)
        backward(outside, step, 2)
        assert torch.equal(second.clip_grad_norm_(0.1), first.last_norm)
        second.step()
        second.zero_grad()
    assert torch.equal(weights(inside), weights(outside))


@pytest.mark.parametrize("where", ["projected", "plain", "one of four micro-batches"])
def test_a_gradient_that_is_not_finite_costs_one_step_and_nothing_else(network, exact, backward, train, weights, where):
    model = network()
    optimizer = LowRankAdamW(model.parameters(), lr=1e-2, config=exact(update_gap=1))
    train(model, optimizer, range(2))
    before, state = weights(model), copy.deepcopy(dict(optimizer.state))
    state = dict(zip(optimizer.state, state.values()))
    if where == "one of four micro-batches":
        backward(model, 2, parts=4)
        (model(torch.full((2, 48), float("nan"))).sum()).backward()
    else:
        parameter = model.second.weight if where == "projected" else model.last.bias
        handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        backward(model, 2)
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    assert torch.equal(weights(model), before)
    for parameter, values in state.items():
        for key, value in values.items():
            now = optimizer.state[parameter][key]
            assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value, key
    train(model, optimizer, [3])
    assert optimizer.skipped_steps == 1 and not torch.equal(weights(model), before) and weights(model).isfinite().all()


def test_zero_grad_forgets_projected_gradients(network, exact, backward, train, weights):
    model, twin = network(), network()
    optimizer, other = (LowRankAdamW(m.parameters(), config=exact()) for m in (model, twin))
    backward(model, 5)
    optimizer.zero_grad()
    train(model, optimizer, [0])
    train(twin, other, [0])
    assert torch.equal(weights(model), weights(twin))


def test_steps_without_gradients_change_nothing_but_the_count(network, exact, train, weights):
    model = network()
    optimizer = LowRankAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, config=exact())
    train(model, optimizer, range(2))
    before = weights(model)
    optimizer.step()
    assert torch.equal(weights(model), before) and optimizer.param_groups[0]["step"] == 3
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("storage", ["fp32", "default"])
@pytest.mark.parametrize("refresh", ["power", "rsvd"])
def test_resuming_is_bit_equal_across_a_refresh_and_loads_weights_only(
    network, exact, train, weights, storage, refresh
):
    """Case 34. By default with bf16 weights, so that stochastic rounding has to resume too."""
    changes = {"refresh": refresh, "update_gap": 4}
    config = exact(**changes) if storage == "fp32" else LowRankConfig(rank=8, **changes)
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    straight = network().to(dtype)
    optimizer = LowRankAdamW(straight.parameters(), lr=1e-2, config=config)
    train(straight, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for state in saved["optimizer"]["state"].values():
        assert all(isinstance(value, (torch.Tensor, int, str)) for value in state.values())
    resumed = network().to(dtype)
    resumed.load_state_dict(saved["model"])
    other = LowRankAdamW(resumed.parameters(), lr=1e-2, config=config)
    other.load_state_dict(saved["optimizer"])
    train(straight, optimizer, range(3, 9))
    train(resumed, other, range(3, 9))
    assert torch.equal(weights(straight), weights(resumed))
    assert optimizer.state[straight.first.weight]["refreshes"] >= 3
    for mine, theirs in (
        (optimizer.state[p], other.state[q]) for p, q in zip(straight.parameters(), resumed.parameters())
    ):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]


def test_a_state_saved_before_the_first_good_step_is_loaded(network, exact, train, backward, weights):
    """A basis without moments, as a first gradient that is not finite leaves it."""
    model, resumed = network(), network()
    optimizer, other = (LowRankAdamW(m.parameters(), lr=1e-2, config=exact()) for m in (model, resumed))
    (model(torch.full((2, 48), float("nan"))).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1 and "mean" not in optimizer.state[model.first.weight]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (resumed, other)):
        train(m, o, range(1, 4))
    assert torch.equal(weights(model), weights(resumed)) and other.skipped_steps == 1


def test_a_state_of_another_kind_is_refused_in_one_line(network, exact, train):
    model = network()
    adam = torch.optim.AdamW(model.parameters())
    train(model, adam, [0])
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    with pytest.raises(ValueError, match=r"^the optimizer state was saved by another optimizer"):
        optimizer.load_state_dict(adam.state_dict())
    train(model, optimizer, [0])
    other = LowRankAdamW(network().parameters(), config=exact(side="out"))
    with pytest.raises(
        ValueError, match=r"^the optimizer state was saved with another `side`: a basis has 48 rows, not 96"
    ):
        other.load_state_dict(optimizer.state_dict())


def test_another_rank_and_storage_take_over_at_the_next_refresh(network, exact, train):
    model, resumed = network(), network()
    optimizer = LowRankAdamW(model.parameters(), config=exact(update_gap=1))
    train(model, optimizer, range(2))
    other = LowRankAdamW(resumed.parameters(), config=exact(rank=4, basis_storage="bf16", update_gap=1))
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(model.state_dict())
    assert other.state[resumed.second.weight]["basis"].shape == (96, 8)
    train(resumed, other, [2])
    basis = other.state[resumed.second.weight]["basis"]
    assert basis.shape == (96, 4)


def test_a_grad_scaler_is_refused_where_gradients_are_taken(network, exact, loss):
    model = network()
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss(model, 0)).backward()
    with pytest.raises(RuntimeError, match=r"^LowRankAdamW does not work with an fp16 GradScaler"):
        scaler.step(optimizer)


def test_a_grad_scaler_gives_the_same_steps_where_gradients_stay(network, exact, train, loss, weights):
    plain, scaled = network(), network()
    first, second = (LowRankAdamW(m.parameters(), config=exact(accumulate_in_subspace=False)) for m in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    train(plain, first, range(3))
    for step in range(3):
        scaler.scale(loss(scaled, step)).backward()
        scaler.step(second)
        scaler.update()
        second.zero_grad()
    torch.testing.assert_close(weights(plain), weights(scaled), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("attribute", "owner"), [("ds_id", "DeepSpeed ZeRO-3"), ("device_mesh", "FSDP2")])
def test_sharded_parameters_are_refused(attribute, owner):
    parameter = nn.Parameter(torch.zeros(64, 64))
    setattr(parameter, attribute, 1)
    with pytest.raises(ValueError, match=f"is sharded by {owner}"):
        LowRankAdamW([parameter])


def test_flattened_parameters_are_refused():
    class FlatParameter(nn.Parameter):
        pass

    with pytest.raises(ValueError, match="is sharded by FSDP"):
        LowRankAdamW([FlatParameter(torch.zeros(64 * 64))])


def test_a_parameter_moved_to_another_group_is_projected_on(network, exact, train):
    """As trainers give the critic a learning rate of its own."""
    model = network()
    optimizer = LowRankAdamW(model.parameters(), lr=1e-2, config=exact())
    (group,) = optimizer.param_groups
    moved = [model.second.weight]
    group["params"] = [p for p in group["params"] if p is not moved[0]]
    optimizer.add_param_group({**{k: v for k, v in group.items() if k != "params"}, "params": moved, "lr": 0.0})
    before = model.second.weight.detach().clone()
    train(model, optimizer, range(2))
    assert torch.equal(model.second.weight.detach(), before)
    assert isinstance(optimizer._matrices[moved[0]], ProjectedMatrix) and model.second.weight.grad is None


def test_sparse_gradients_are_refused_in_one_line(exact):
    embedding = nn.Embedding(90, 64, sparse=True)
    optimizer = LowRankAdamW(embedding.parameters(), config=exact())
    with pytest.raises(RuntimeError, match=r"^a gradient is sparse; low rank needs dense ones"):
        embedding(torch.tensor([3])).sum().backward()
    assert optimizer.skipped_steps == 0


def test_frozen_parameters_are_left_alone(network, exact, train):
    model = network()
    model.first.weight.requires_grad_(False)
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    before = model.first.weight.clone()
    train(model, optimizer, range(2))
    assert torch.equal(model.first.weight, before) and list(optimizer._matrices) == [model.second.weight]


def test_the_energy_policy_does_not_see_the_clip(network, exact, train):
    ranks = []
    for limit in (1e-3, 1e9):
        model = network()
        config = exact(rank=24, rank_policy="energy", energy=0.8, rank_min=4, rank_max=40, update_gap=1)
        optimizer = LowRankAdamW(model.parameters(), lr=1e-9, config=config, max_grad_norm=limit)
        ranks.append([])
        for step in range(6):
            train(model, optimizer, [step])
            ranks[-1] += [optimizer.state[weight]["rank"] for weight in (model.first.weight, model.second.weight)]
    assert ranks[0] == ranks[1] and len(set(ranks[0])) > 1
