import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.shapes import (
    adamw_bytes,
    decoder_matrices,
    equal_chunk_rows,
    group_rows,
    low_rank_bytes,
    low_rank_shape,
    plan_widths,
    projected_dim,
    refresh_due,
    saves_memory,
    storage_bytes,
    tanh_rank,
)


@st.composite
def rollouts(draw):
    """Lengths, the random mini-batches of some epochs, rows of a chunk."""
    batch, num_mini_batches = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    total = batch * num_mini_batches
    lengths = draw(st.lists(st.integers(1, 40), min_size=total, max_size=total))
    epochs = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(total)))
        epochs.append([order[start : start + batch] for start in range(0, total, batch)])
    return lengths, epochs, draw(st.integers(1, 5))


def padded_tokens(lengths, epochs, rows, widths):
    """What training really computes: the area of every chunk, filler rows included."""
    return sum(
        rows * width for epoch in epochs for batch in epoch for width, _ in group_rows(batch, widths, lengths, rows)
    )


@settings(max_examples=100, deadline=None)
@given(rollouts(), st.integers(1, 4))
def test_a_plan_fits_every_row_and_never_costs_more_than_one_class(rollout, max_classes):
    lengths, epochs, rows = rollout
    widths = plan_widths(lengths, epochs, rows, max_classes)
    assert len(widths) == len(lengths)
    assert all(width >= length + 1 for width, length in zip(widths, lengths))
    assert len(set(widths)) <= max_classes
    one_class = [max(lengths) + 1] * len(lengths)
    assert padded_tokens(lengths, epochs, rows, widths) <= padded_tokens(lengths, epochs, rows, one_class)
    assert widths == plan_widths(list(lengths), [[list(b) for b in epoch] for epoch in epochs], rows, max_classes)


@settings(max_examples=50, deadline=None)
@given(rollouts())
def test_a_plan_is_the_cheapest_when_every_length_is_a_candidate(rollout):
    lengths, epochs, rows = rollout
    lengths = [length % 8 + 1 for length in lengths][:16]  # at most 16 rows: every length is a quantile
    epochs = [[[i for i in batch if i < 16] for batch in epoch] for epoch in epochs]
    distinct = sorted(set(lengths))
    best = min(
        padded_tokens(lengths, epochs, rows, [next(b for b in (*borders, distinct[-1]) if n <= b) + 1 for n in lengths])
        for classes in range(3)
        for borders in itertools.combinations(distinct[:-1], classes)
    )
    assert padded_tokens(lengths, epochs, rows, plan_widths(lengths, epochs, rows, max_classes=3)) == best
    assert padded_tokens(lengths, epochs, rows, plan_widths(lengths, epochs, rows)) <= best


def test_equal_cost_takes_the_fewer_classes():
    # Rows of 3 and 9 in chunks of one row: two classes cost 4 + 10; with the batch [3, 9] in one chunk of two, 20.
    assert plan_widths([3, 9], [[[0, 1]]], rows=1) == [4, 10]
    # Two classes: 2 x (2 x 5) + 2 x (2 x 10) = 60; one class: 3 x (2 x 10) = 60.
    lengths = [4, 9, 4, 9, 4, 9]
    epochs = [[[0, 1], [2, 4], [3, 5]]]
    assert padded_tokens(lengths, epochs, 2, [5, 10] * 3) == padded_tokens(lengths, epochs, 2, [10] * 6) == 60
    assert plan_widths(lengths, epochs, 2) == [10] * 6


def test_long_tailed_lengths_save_most_of_the_padding():
    lengths = [20] * 56 + [400] * 8
    epochs = [[list(range(0, 64, 2)), list(range(1, 64, 2))]]
    widths = plan_widths(lengths, epochs, rows=4)
    assert sorted(set(widths)) == [21, 401]
    assert padded_tokens(lengths, epochs, 4, widths) < padded_tokens(lengths, epochs, 4, [401] * 64) / 4


def test_spread_lengths_get_as_many_widths_as_pay():
    """Lengths of 1 to 64, all rows in one mini-batch: hardly any padding; with three widths a quarter."""
    lengths = list(range(1, 65))
    epochs = [[list(range(64))]] * 4
    assert padded_tokens(lengths, epochs, 4, plan_widths(lengths, epochs, 4)) < 1.1 * 4 * sum(lengths)
    assert padded_tokens(lengths, epochs, 4, plan_widths(lengths, epochs, 4, max_classes=3)) > 1.25 * 4 * sum(lengths)
    # Eight mini-batches of eight at random: each further width would only fill up more chunks.
    order = sorted(lengths, key=lambda length: (length * 37) % 64)
    drawn = [[[length - 1 for length in order[start : start + 8]] for start in range(0, 64, 8)]]
    assert len(set(plan_widths(lengths, drawn, 8))) == 1


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"rows": 4, "max_classes": 0}])
def test_plan_refuses_sizes_below_one(arguments):
    with pytest.raises(ValueError, match=r"rows, max_classes: found .*, must be at least 1"):
        plan_widths([1], [[[0]]], **arguments)


def test_no_rows_have_no_widths():
    assert plan_widths([], [], rows=4) == []


@settings(max_examples=100, deadline=None)
@given(rollouts())
def test_groups_are_a_partition_into_sorted_chunks_of_one_width(rollout):
    lengths, epochs, rows = rollout
    widths = plan_widths(lengths, epochs, rows)
    for batch in epochs[0]:
        chunks = group_rows(batch, widths, lengths, rows)
        assert sorted(i for _, members in chunks for i in members) == sorted(batch)
        assert all(1 <= len(members) <= rows for _, members in chunks)
        assert all(widths[i] == width for width, members in chunks for i in members)
        for _, same in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
            of_class = list(same)
            inside = [lengths[i] for _, members in of_class for i in members]
            assert inside == sorted(inside)
            assert all(len(members) == rows for _, members in of_class[:-1])  # only the last needs filler rows
        assert chunks == group_rows(batch[::-1], widths, lengths, rows)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_equal_chunks_waste_less_than_a_row_each(total, most):
    rows = equal_chunk_rows(total, most)
    chunks = max(1, -(-total // most))
    assert 1 <= rows <= most
    assert -(-total // rows) <= chunks
    assert total <= rows * chunks and (rows - 1) * chunks < max(total, 1)


# Low rank


@pytest.mark.parametrize(
    ("shape", "side", "in_dim", "dim"),
    [
        ((8, 4), "in", 1, 1),
        ((8, 4), "out", 1, 0),
        ((8, 4), "in", 0, 0),
        ((8, 4), "short", 0, 1),
        ((4, 8), "short", 1, 0),
        ((8, 4), "long", 1, 0),
        ((4, 8), "long", 1, 1),
        ((4, 4), "short", 1, 1),
        ((4, 4), "long", 0, 0),
    ],
)
def test_the_projected_dimension(shape, side, in_dim, dim):
    assert projected_dim(shape, side, in_dim) == dim
    sizes = low_rank_shape(shape, 99, side, in_dim)
    assert sizes == (shape[dim], shape[1 - dim], min(shape))


def test_every_matrix_is_renewed_once_a_gap_and_never_all_in_one_step():
    steps = {index: [s for s in range(200) if refresh_due(s, index, gap=50)] for index in range(211)}
    assert all(b - a == 50 for found in steps.values() for a, b in itertools.pairwise(found))
    per_step = [sum(step in found for found in steps.values()) for step in range(200)]
    assert max(per_step) <= 5 and sum(per_step) == 4 * 211


@pytest.mark.parametrize(("gap", "rollout"), [(50, 8), (4, 16), (1, 4), (100, 7)])
def test_bases_are_renewed_in_the_last_step_of_a_rollout(gap, rollout):
    for index in range(7):
        steps = [step for step in range(40 * rollout) if refresh_due(step, index, gap, rollout)]
        assert len(steps) > 1 and all((step + 1) % rollout == 0 for step in steps)
        assert {b - a for a, b in itertools.pairwise(steps)} == {max(1, round(gap / rollout)) * rollout}


def test_gap_0_never_renews():
    assert not any(refresh_due(step, index, gap=0) for step in range(99) for index in range(9))


def test_the_tanh_schedule_rises_from_base_and_ends_at_base_plus_delta():
    ranks = [tanh_rank(step, 32, 64, 1000.0) for step in range(0, 20_000, 100)]
    assert ranks[0] == 32 and ranks[-1] == 96 and ranks == sorted(ranks)


def test_bytes_of_the_published_example():
    # One 8192 x 8192 matrix, rank 64, fp8: 99.2 % less than its fp16 gradient, and 3 % of that for the scales.
    full, codes = 2 * 8192**2, 8192 * 64 * 2
    assert 1 - codes / full == pytest.approx(0.992, abs=5e-4)
    assert 2 * storage_bytes(8192 * 64, "fp8") == pytest.approx(codes * 1.031, rel=1e-3)


def test_bytes_of_smollm2_and_adamw():
    matrices = [shape for _, shape in decoder_matrices(576, 1536, 30, 192, 49152, tied=True)]
    ours = sum(low_rank_bytes(low_rank_shape(shape, 64), accumulator="bf16") for shape in matrices)
    assert ours < 75e6
    assert adamw_bytes(sum(a * b for a, b in matrices)) / 2**20 == pytest.approx(770, abs=1)


def test_a_projection_is_worth_it_only_below_the_rank_of_the_matrix_and_where_it_saves():
    assert saves_memory(low_rank_shape((576, 576), 64))
    assert not saves_memory(low_rank_shape((4, 576), 128))
    assert not saves_memory(low_rank_shape((64, 64), 48))
