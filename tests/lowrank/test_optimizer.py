"""What must hold of LowRankAdamW, each against an oracle of its own."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

from trl_alpharl.functional.quantize import Encoded, decode
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.matrix import ProjectedMatrix
from trl_alpharl.lowrank.optimizer import LowRankAdamW

FIXED = {"refresh": "random", "update_gap": 0}


def test_without_projection_it_is_torch_s_adamw(network, exact, train, weights):
    ours, theirs = network(), network()
    kwargs = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    first = LowRankAdamW([{"params": list(ours.parameters()), "rank": 0}], config=exact(), **kwargs)
    second = torch.optim.AdamW(theirs.parameters(), **kwargs)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) for optimizer in (first, second)]
    for step in range(8):
        for model, optimizer, schedule in zip((ours, theirs), (first, second), schedules):
            train(model, optimizer, [step])
            schedule.step()
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_fixed_basis_is_adam_on_the_projected_gradient(network, exact, train, backward, side):
    model, before = network(), network()
    config = exact(**FIXED, side=side, scale=0.5)
    optimizer = LowRankAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, config=config)
    adam = None
    for step in range(5):
        before.load_state_dict(model.state_dict())
        before.zero_grad()
        backward(before, step)
        train(model, optimizer, [step])
        basis = optimizer.state[model.second.weight]["basis"]
        gradient = before.second.weight.grad if side == "out" else before.second.weight.grad.T
        if adam is None:
            coordinates = nn.Parameter(torch.zeros(8, gradient.shape[1]))
            adam = torch.optim.Adam([coordinates], lr=1e-2 * 0.5)
        start = coordinates.detach().clone()
        coordinates.grad = basis.T @ gradient
        adam.step()
        move = basis @ (coordinates.detach() - start)
        expected = before.second.weight.detach() * (1 - 1e-2 * 0.1) + (move if side == "out" else move.T)
        torch.testing.assert_close(model.second.weight.detach(), expected, rtol=0, atol=1e-6)


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


def test_a_refresh_step_holds_whole_gradients_of_few_matrices_only(exact):
    """Staggered; and the first step, where all look, keeps a few columns of each."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])
    optimizer = LowRankAdamW(model.parameters(), config=exact(rank=4, refresh="rsvd", update_gap=10))
    held = []
    for _ in range(11):
        model(torch.randn(4, 64)).square().mean().backward()
        held.append(optimizer.gradient_bytes())
        optimizer.step()
    ordinary = 10 * 4 * (4 * 64 + 4 * 64)  # R and the sketch, fp32
    assert held[0] < ordinary + 10 * 64 * 16 * 4
    assert all(bytes_ <= ordinary + 64 * 64 * 4 for bytes_ in held[1:])


# The norm


def true_norm(model, backward, step, parts=1):
    backward(model, step, parts)
    return torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()


def test_the_norm_is_exact_after_one_micro_batch(network, exact, backward):
    model = network()
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    for step in range(3):
        backward(model, step)
        twin = network()
        twin.load_state_dict(model.state_dict())
        torch.testing.assert_close(optimizer.grad_norm(), true_norm(twin, backward, step))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("width", [1, 16])
def test_the_norm_of_several_micro_batches_is_unbiased_in_the_square(network, exact, backward, width):
    squares = []
    for seed in range(60):
        model = network()
        optimizer = LowRankAdamW(model.parameters(), config=exact(**FIXED, seed=seed, norm_sketch=width))
        backward(model, 0, parts=4)
        squares.append(float(optimizer.grad_norm()) ** 2)
    truth = float(true_norm(network(), backward, 0)) ** 2
    squares = torch.tensor(squares) / truth
    assert squares.mean() == pytest.approx(1, abs=4 * float(squares.std()) / 60**0.5)
    assert squares.std() < (0.8 if width == 1 else 0.2)  # a wider sketch is nearer
    assert squares.std() > 1e-3  # and an estimate it is


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


# Faults


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


# State


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


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8", "int8", "8bit", "nf4"])
def test_every_item_is_kept_in_its_kind_and_training_still_works(exact, kind):
    torch.manual_seed(0)
    model = nn.Linear(192, 256, bias=False)
    target = torch.randn(256, 3) @ torch.randn(3, 192)
    config = LowRankConfig(rank=24, basis_storage=kind, moment_storage=kind, accumulator_storage=kind)
    optimizer = LowRankAdamW(model.parameters(), lr=0.5, config=config)
    losses = []
    for _ in range(40):
        loss = (model.weight - target).square().mean()
        loss.backward()
        assert optimizer._matrices[model.weight].gradient.parts["projected_kind"] == kind
        losses.append(float(loss.detach()))
        optimizer.step()
    state = optimizer.state[model.weight]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    for name in ("basis", "mean", "square"):
        assert state[f"{name}_kind"] == kind
        unsigned = kind == "int8" and name == "square"
        assert state[name].dtype == (torch.uint8 if unsigned else dtype.get(kind, torch.uint8))
    assert losses[-1] < 0.5 * losses[0]
    basis = decode(Encoded(state["basis"], state.get("basis_scales")), kind, (192, 24))
    assert (basis.T @ basis - torch.eye(24)).abs().max() < 0.3


def test_the_state_is_as_large_as_the_formula_says(exact):
    from trl_alpharl.shapes import low_rank_bytes, low_rank_shape, storage_bytes

    model = nn.Linear(192, 512, bias=False)
    optimizer = LowRankAdamW(model.parameters(), config=LowRankConfig(rank=32))
    model(torch.randn(2, 192)).sum().backward()
    sketch = seen = 192 * 4
    held = optimizer.gradient_bytes()
    assert held == storage_bytes(32 * 512, "fp32") + sketch * 4 + seen * 40
    optimizer.step()
    accumulator = storage_bytes(32 * 512, "fp32")
    assert optimizer.state_bytes() + accumulator == low_rank_bytes(low_rank_shape((512, 192), 32))


# Weights in bf16


@pytest.mark.parametrize("rounding", [True, False])
def test_small_updates_of_bf16_weights_need_stochastic_rounding(rounding):
    model = nn.Linear(96, 128, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = LowRankAdamW(model.parameters(), lr=2e-4, config=LowRankConfig(rank=8, stochastic_rounding=rounding))
    x = torch.ones(1, 96, dtype=torch.bfloat16)
    for _ in range(20):
        model(x).float().sum().backward()
        optimizer.step()
    moved = float(1 - model.weight.float().mean())
    assert (moved > 1e-4) if rounding else (moved == 0)


# The scaled update


def test_the_scaled_update_scales_each_channel_of_the_full_gradient(network, exact, backward):
    model, before = network(), network()
    optimizer = LowRankAdamW(model.parameters(), lr=1e-2, config=exact(**FIXED, update="scaled"))
    backward(before, 0)
    backward(model, 0)
    assert model.second.weight.grad is not None
    optimizer.step()
    basis = optimizer.state[model.second.weight]["basis"]
    gradient = before.second.weight.grad
    projected = gradient @ basis  # (80, 8): a row a channel
    adam = projected.sign()  # Adam's first step
    scales = adam.norm(dim=1) / projected.norm(dim=1)
    expected = before.second.weight - 1e-2 * gradient * scales[:, None]
    torch.testing.assert_close(model.second.weight, expected, rtol=1e-3, atol=1e-5)


# Ranks


def test_the_tanh_policy_raises_the_rank_and_keeps_going(network, exact, train):
    model = network()
    config = exact(rank_policy="tanh", tanh_base=4, tanh_delta=12, tanh_tau=5.0, update_gap=2)
    optimizer = LowRankAdamW(model.parameters(), config=config)
    ranks = []
    for step in range(30):
        train(model, optimizer, [step])
        ranks.append(optimizer.state[model.first.weight]["rank"])
    assert ranks == sorted(ranks) and ranks[0] >= 4 and ranks[-1] == 16
    assert optimizer.state[model.first.weight]["mean"].shape == (16, 96)


def test_the_energy_policy_finds_the_rank_of_the_gradient():
    torch.manual_seed(0)
    model = nn.Linear(64, 256, bias=False)
    config = LowRankConfig(rank=32, rank_policy="energy", update_gap=1, rank_min=4, rank_max=48)
    optimizer = LowRankAdamW(model.parameters(), lr=1e-6, config=config)
    directions = torch.randn(12, 64)
    ranks = []
    for step in range(12):
        g = torch.Generator().manual_seed(step)
        seen = directions if step < 6 else torch.randn(40, 64, generator=torch.Generator().manual_seed(9))
        output = torch.randn(len(seen), 256, generator=g)
        (model(seen) * output).sum().backward()
        optimizer.step()
        ranks.append(optimizer.state[model.weight]["rank"])
    assert ranks[0] == 32 and ranks[5] in (8, 16)
    assert ranks[-1] > 24


def test_a_rank_change_keeps_a_constant_gradient_s_momentum(exact):
    """The update keeps its direction and size through every change of rank."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    direction = torch.randn(128, 3) @ torch.randn(3, 64)
    config = exact(rank_policy="tanh", tanh_base=6, tanh_delta=10, tanh_tau=4.0, update_gap=1)
    optimizer = LowRankAdamW(model.parameters(), lr=1e-2, config=config)
    moves = []
    for _ in range(10):
        before = model.weight.detach().clone()
        (model.weight * direction).sum().backward()
        optimizer.step()
        moves.append((model.weight.detach() - before).flatten())
        state = optimizer.state[model.weight]
        mean = state["mean"] / state["mean_mass"].clamp(min=1e-9)[:, None]
        if len(moves) > 1:
            momentum = (state["basis"] @ mean).T
            torch.testing.assert_close(
                momentum, direction, rtol=0, atol=0.35 * float(direction.abs().max()) / len(moves)
            )
    assert state["rank"] > 12


# What is refused or handled


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


def test_tied_weights_are_one_matrix_with_both_gradients(exact):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
    head.weight = embedding.weight
    ids = torch.randint(0, 50, (4, 6))
    optimizer = LowRankAdamW(embedding.parameters(), config=exact(rank=4, **FIXED))
    head(embedding(ids)).logsumexp(-1).sum().backward()
    taken = optimizer._matrices[embedding.weight].gradient.parts["projected"]
    twin = nn.Parameter(embedding.weight.detach().clone())
    (nn.functional.embedding(ids, twin) @ twin.T).logsumexp(-1).sum().backward()
    basis = optimizer.state[embedding.weight]["basis"]
    torch.testing.assert_close(taken, basis.T @ twin.grad.T, rtol=1e-4, atol=1e-5)


def test_vectors_scalars_and_small_matrices_get_plain_adamw(network, exact):
    model = network()
    optimizer = LowRankAdamW(model.parameters(), config=exact())
    assert set(optimizer._matrices) == {model.first.weight, model.second.weight}


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
