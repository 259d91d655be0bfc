import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.shapes import equal_chunk_rows, group_rows, plan_widths


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
    assert padded_tokens(lengths, epochs, rows, plan_widths(lengths, epochs, rows)) == best


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
