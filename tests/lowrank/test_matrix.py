"""One projected matrix: Adam in a basis, the norm, ranks, storage, rounding."""

import pytest
import torch
from torch import nn

from trl_alpharl.functional.quantize import Encoded, decode
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.matrix import ProjectedMatrix
from trl_alpharl.lowrank.optimizer import LowRankAdamW

FIXED = {"refresh": "random", "update_gap": 0}


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


def test_a_refresh_step_holds_whole_gradients_of_few_matrices_only(exact):
    """Staggered; and the first step, where all look, keeps a few columns of each."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])
    optimizer = LowRankAdamW(model.parameters(), config=exact(rank=4, refresh="rsvd", update_gap=10))
    held = []
    for _ in range(11):
        model(torch.randn(4, 64)).square().mean().backward()
        held.append(optimizer.gradient_bytes())
        optimizer.step()
    ordinary = 10 * 4 * (4 * 64 + 4 * 64)  # projected gradients and sketches, fp32
    assert held[0] < ordinary + 10 * 64 * 16 * 4 + 10 * 8 * 64 * 4  # a wider sketch beside the random basis
    assert all(bytes_ <= ordinary + 64 * 64 * 4 for bytes_ in held[1:])


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


def test_the_sketch_is_wider_beside_a_random_basis(network, exact, backward):
    """There it has most of the norm to say."""

    def widths(**changes):
        model = network()
        optimizer = LowRankAdamW(model.parameters(), config=exact(norm_sketch=4, **changes))
        found = []
        for step in range(3):
            backward(model, step, parts=2)
            found.append({len(matrix.gradient.sketch) for matrix in optimizer._matrices.values()})
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert widths() == [{12}, {4}, {4}]
    assert widths(refresh="random") == [{12}] * 3


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
    sketch, seen = 12 * 512, 192 * 40
    held = optimizer.gradient_bytes()
    assert held == storage_bytes(32 * 512, "fp32") + (sketch + seen) * 4
    optimizer.step()
    accumulator = storage_bytes(32 * 512, "fp32")
    assert optimizer.state_bytes() + accumulator == low_rank_bytes(low_rank_shape((512, 192), 32))


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


def test_zeros_show_no_basis_and_the_first_one_is_looked_for_again(exact):
    """LoRA's A has a gradient of zeros in step 0, where B starts at zero."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    direction = torch.randn(128, 3) @ torch.randn(3, 64)
    optimizer = LowRankAdamW(model.parameters(), config=exact(rank=8, update_gap=4))
    kept, bases = [], []
    for step in range(12):
        (model.weight * direction * (step not in (0, 4, 5))).sum().backward()
        optimizer.step()
        kept.append(optimizer.statistics()["lowrank/energy"])
        bases.append(optimizer.state[model.weight]["basis"])
    assert kept[1] < 0.5 and min(kept[2:4] + kept[6:]) == pytest.approx(1, abs=1e-4)
    assert torch.equal(bases[3], bases[4])  # a turn that saw zeros keeps the basis
    assert optimizer.state[model.weight]["refreshes"] == 2


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


@pytest.mark.slow
def test_gradient_and_state_of_a_135m_model_fit_in_80_mb():
    """In every step, the first included; AdamW's are 807 MB (770 MiB) in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).bfloat16()
    low_rank = LowRankConfig(rank=64, accumulator_storage="bf16", update_gap=50)
    optimizer = LowRankAdamW(model.parameters(), config=low_rank)
    most, update = 0, ProjectedMatrix.update

    def watched(self, *args):
        nonlocal most
        update(self, *args)
        most = max(most, optimizer.gradient_bytes() + optimizer.state_bytes())

    try:
        ProjectedMatrix.update = watched
        for _ in range(3):
            model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            most = max(most, optimizer.gradient_bytes() + optimizer.state_bytes())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        ProjectedMatrix.update = update
    assert 60e6 < most < 80e6
