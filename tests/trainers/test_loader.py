"""Mini-batches and evaluation batches as loaders."""

from __future__ import annotations

import pytest

from trl_alpharl.trainers.loader import PromptLoader, RolloutLoader, mini_batches


def test_a_rollout_loader_starts_where_the_step_counter_stands():
    """Two rollouts of 3 steps are one pass over 10 rows in batches of 5."""
    step = 4
    loader = RolloutLoader(range(10), 5, 3, 100, step=lambda: step, item=lambda number: number)
    assert len(loader) == 6
    assert list(loader) == [4, 5]
    step = 6
    assert list(loader) == [6, 7, 8, 9, 10, 11]


def test_an_item_is_made_when_it_is_asked_for():
    """The next rollout must come from the weights after the last step."""
    made = []
    loader = iter(RolloutLoader(range(4), 2, 1, 100, step=lambda: 0, item=made.append))
    next(loader)
    assert made == [0]


@pytest.mark.parametrize(("rows", "processes"), [(1, 2), (7, 2), (7, 3), (0, 2)])
def test_processes_share_an_evaluation_set_without_repeating_rows(rows, processes):
    dataset = [{"row": row} for row in range(rows)]
    loaders = [PromptLoader(dataset, 2, process, processes) for process in range(processes)]
    seen = [example["row"] for loader in loaders for batch in loader for example in batch]
    assert sorted(seen) == list(range(rows))
    assert [len(list(loader)) for loader in loaders] == [len(loader) for loader in loaders]
    assert all(len(batch) <= 2 for loader in loaders for batch in loader)


def test_every_row_is_trained_on_once_an_epoch():
    plan = mini_batches(12, 3, 4, seed=(7, 0, 0))
    assert [len(epoch) for epoch in plan] == [3] * 4
    for epoch in plan:
        assert [len(rows) for rows in epoch] == [4] * 3
        assert sorted(row for rows in epoch for row in rows) == list(range(12))
    assert len({str(epoch) for epoch in plan}) == 4  # a fresh permutation each


def test_permutations_follow_from_the_seed_alone():
    same = mini_batches(12, 3, 2, seed=(7, 1, 0))
    assert same == mini_batches(12, 3, 2, seed=(7, 1, 0))
    others = [mini_batches(12, 3, 2, seed=seed) for seed in ((8, 1, 0), (7, 2, 0), (7, 1, 1))]
    assert all(other != same for other in others)


@pytest.mark.parametrize("extra", [1, 5, 36])
def test_replayed_rows_enlarge_the_mini_batches_and_move_nobody(extra):
    plain = mini_batches(12, 3, 2, seed=(7, 0, 0))
    more = mini_batches(12, 3, 2, seed=(7, 0, 0), extra_rows=extra)
    for before, after in zip(plain, more):
        assert [rows[:4] for rows in after] == before
        added = [rows[4:] for rows in after]
        assert sorted(row for rows in added for row in rows) == list(range(12, 12 + extra))
        assert max(map(len, added)) - min(map(len, added)) <= 1


def test_a_finished_run_gets_no_further_step():
    assert list(RolloutLoader(range(10), 5, 3, 6, step=lambda: 6, item=lambda step: step)) == []
    assert list(RolloutLoader(range(10), 5, 3, 8, step=lambda: 6, item=lambda step: step)) == [6, 7]
