"""Chunks of a rollout: nothing is lost, moved or padded away, and a row has one shape in all passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.records import Rollout, TokenStats
from trl_alpharl.rollout.prompts import pad_left
from trl_alpharl.rollout.scoring import build_chunk, gather_rows, plan_chunks, score_rollout

PAD = 0


def rollout_of(prompts: list[list[int]], completions: list[list[int]]) -> Rollout:
    prompt_ids, prompt_mask = pad_left(prompts, PAD)
    width = max(1, *map(len, completions))
    ids, mask = torch.full((len(completions), width), PAD), torch.zeros((len(completions), width), dtype=torch.bool)
    for row, tokens in enumerate(completions):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long), True
    return Rollout(
        index=0,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=ids,
        completion_mask=mask,
        finished=torch.zeros(len(completions), dtype=torch.bool),
        examples=[],
    )


TOKEN = st.integers(0, 9)  # 0 is the pad id: it may also be an ordinary token
PROMPT, COMPLETION = st.lists(TOKEN, min_size=1, max_size=7), st.lists(TOKEN, min_size=0, max_size=6)


@st.composite
def planned(draw):
    """A rollout, the mini-batches of two epochs over it, and the rows of a chunk."""
    size = draw(st.integers(1, 8))
    batches = draw(st.integers(1, size))
    prompts = [draw(PROMPT) for _ in range(size)]
    completions = [draw(COMPLETION) for _ in range(size)]
    epochs = []
    for _ in range(2):
        order = draw(st.permutations(range(size)))
        epochs.append([list(order[number::batches]) for number in range(batches)])
    return prompts, completions, epochs, draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(planned())
def test_chunks_keep_every_token_and_say_where_it_is_predicted(case):
    prompts, completions, epochs, rows = case
    rollout = rollout_of(prompts, completions)
    plan = plan_chunks(rollout, epochs, rows)
    for indices in [range(len(prompts)), *(batch for epoch in epochs for batch in epoch)]:
        seen = []
        for chunk in plan.chunks(rollout, indices):
            seen += chunk.rows
            assert chunk.input_ids.shape[0] == rows
            for slot, row in enumerate(chunk.rows + chunk.rows[:1] * (rows - len(chunk.rows))):
                whole = prompts[row] + completions[row]
                attended = chunk.attention_mask[slot].bool()
                assert chunk.input_ids[slot][attended].tolist() == whole
                assert attended.tolist() == [True] * len(whole) + [False] * (len(attended) - len(whole))
                assert not attended[-1]  # one padded column: the same attention kernel in every chunk
                assert chunk.position_ids[slot].tolist() == [*range(len(attended) - 1), len(attended) - 2]
                counts = len(completions[row]) if slot < len(chunk.rows) else 0
                mask = chunk.completion_mask[slot]
                assert mask.tolist() == [True] * counts + [False] * (len(mask) - counts)
                assert chunk.completion_ids[slot][mask].tolist() == completions[row][:counts]
                # the token after each predicting position is the completion token itself
                after = chunk.predict_at[slot][mask] + 1
                assert chunk.input_ids[slot][after].tolist() == completions[row][:counts]
                assert after.tolist() == list(range(len(prompts[row]), len(prompts[row]) + counts))
        assert sorted(seen) == sorted(indices)


@settings(max_examples=150, deadline=None)
@given(planned())
def test_a_row_runs_in_one_shape_in_scoring_and_in_every_mini_batch(case):
    """TRAPS A6: in bf16 another shape is another result."""
    prompts, completions, epochs, rows = case
    rollout = rollout_of(prompts, completions)
    plan = plan_chunks(rollout, epochs, rows)
    shapes: dict[int, set] = {row: set() for row in range(len(prompts))}
    for indices in [range(len(prompts)), *(batch for epoch in epochs for batch in epoch)]:
        for chunk in plan.chunks(rollout, indices):
            for row in chunk.rows:
                shapes[row].add((chunk.input_ids.shape, chunk.completion_ids.shape))
    assert all(len(found) == 1 for found in shapes.values())


@settings(max_examples=100, deadline=None)
@given(planned())
def test_scoring_puts_every_row_back_and_leaves_padding_0(case):
    prompts, completions, epochs, rows = case
    rollout = rollout_of(prompts, completions)

    class Echo:
        """Says of each token: its id + 1, its place in the row, that it exists, and its negative place."""

        def frozen_hidden(self, chunk):
            return None

        def score(self, chunk, temperature):
            ids, place = chunk.completion_ids.float() + 1, chunk.predict_at.float() + 1
            return TokenStats(ids, place, torch.ones_like(ids)), -place

    stats, reference = score_rollout(Echo(), rollout, plan_chunks(rollout, epochs, rows), 1.0)
    mask = rollout.completion_mask
    assert torch.equal(stats.per_token_logps, (rollout.completion_ids + 1.0) * mask)
    place = rollout.prompt_mask.sum(1, keepdim=True) + torch.arange(mask.shape[1])
    assert torch.equal(stats.entropies, place * mask) and torch.equal(reference, -place * mask)
    assert torch.equal(stats.values, mask.float())
    assert stats.values.dtype == torch.float32


def test_gather_rows_takes_a_chunks_rows_and_fills_up_with_0():
    rollout = rollout_of([[5], [6], [7]], [[1, 2, 3], [4], [5, 6]])
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0]])
    chunk = build_chunk(rollout, [2, 1], num_rows=3, width=4, completion_width=2)
    assert gather_rows(chunk, table).tolist() == [[5.0, 6.0], [4.0, 0.0], [0.0, 0.0]]
    assert gather_rows(chunk, table > 0).tolist() == [[True, True], [True, False], [False, False]]
    wide = build_chunk(rollout, [0], num_rows=1, width=8, completion_width=5)
    assert gather_rows(wide, table).tolist() == [[1.0, 2.0, 3.0, 0.0, 0.0]]


def test_padded_places_hold_a_valid_id_whatever_the_pad_token_is():
    """A pad token beyond the embedding's rows (a tokenizer that grew) must not reach the model."""
    rollout = rollout_of([[5, 6], [7]], [[1], [2]])
    big = rollout.prompt_ids.masked_fill(~rollout.prompt_mask, 10**6)
    chunk = build_chunk(Rollout(**{**vars(rollout), "prompt_ids": big}), [0, 1], 2, 4, 1)
    assert chunk.input_ids.tolist() == [[5, 6, 1, 0], [7, 2, 0, 0]]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_plan_pads_less_than_one_width_for_all(rows):
    prompts = [[1] * 2] * 12 + [[1] * 40] * 12
    rollout = rollout_of(prompts, [[1]] * 24)
    plan = plan_chunks(rollout, [[list(range(24))]], rows)
    assert set(plan.widths) == {4, 42}
