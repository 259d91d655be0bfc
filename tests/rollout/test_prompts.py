"""Which rows a rollout takes, and prompts of every kind as token ids."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.rollout.prompts import PromptTokenizer, pad_left, prompt_rows, seeded_generator


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5), st.integers(0, 2**31))
def test_rollouts_are_slices_of_a_stream_of_permutations(num_rows, batch_size, rollouts, seed):
    stream = [row for index in range(rollouts + 1) for row in prompt_rows(num_rows, batch_size, index, seed)]
    assert len(stream) == batch_size * (rollouts + 1)
    for start in range(0, len(stream), num_rows):
        epoch = stream[start : start + num_rows]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(num_rows))


def test_a_rollout_depends_on_its_index_and_the_seed_alone():
    straight = [prompt_rows(10, 4, index, seed=3) for index in range(8)]
    torch.manual_seed(99)
    torch.rand(5)
    assert prompt_rows(10, 4, 5, seed=3) == straight[5]
    assert prompt_rows(10, 4, 5, seed=4) != straight[5]
    stream = [row for rollout in straight for row in rollout]
    epochs = [stream[start : start + 10] for start in (0, 10, 20)]
    assert epochs[0] != epochs[1] != epochs[2]  # shuffled anew


def test_seeded_generators_differ_by_every_part_and_by_their_order():
    parts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (7, 0, 1), (7, 1, 0)]
    draws = [torch.rand(4, generator=seeded_generator(*part)).tolist() for part in parts]
    assert len({tuple(draw) for draw in draws}) == len(parts)
    assert torch.rand(4, generator=seeded_generator(7, 0, 1)).tolist() == draws[5]


def test_pad_left():
    ids, mask = pad_left([[1, 2, 3], [4]], pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert ids.dtype == torch.long and mask.dtype == torch.bool


# Token ids


def test_text_chat_turns_and_ids(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}w2 {{ message.content }} {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
    )
    rows = [
        {"prompt": "w5 w6"},
        {"prompt": [{"role": "user", "content": "w7"}]},
        {"input_ids": [8, 9]},
        {"input_ids": torch.tensor([0, 0, 8, 9]), "attention_mask": torch.tensor([0, 0, 1, 1])},
        {"prompt": "w5", "input_ids": [0, 9]},  # without a mask every id counts, the pad id too
    ]
    assert PromptTokenizer(tokenizer)(rows) == [[5, 6], [2, 7, 3], [8, 9], [8, 9], [0, 9]]


def test_a_collators_mask_decides(tokenizer):
    """The pad token is also the eos token here: by id, the prompts' last token would be dropped."""

    def collate(rows):
        width = max(len(row["input_ids"]) for row in rows)
        ids = [[1] * (width - len(row["input_ids"])) + row["input_ids"] for row in rows]
        masks = [[0] * (width - len(row["input_ids"])) + [1] * len(row["input_ids"]) for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}

    rows = [{"input_ids": [5, 1], "prompt": "left out of the collator's rows"}, {"input_ids": [1, 6, 7]}]
    assert PromptTokenizer(tokenizer, collate)(rows) == [[5, 1], [1, 6, 7]]
    with pytest.raises(ValueError, match="data_collator must return `attention_mask`"):
        PromptTokenizer(tokenizer, lambda rows: {"input_ids": torch.ones(1, 2)})(rows)


def test_bad_rows_are_one_line_each(tokenizer):
    prompts = PromptTokenizer(tokenizer)
    with pytest.raises(ValueError, match=r"train_dataset needs a `prompt` or an `input_ids` column; it has \['text'\]"):
        prompts.check({"text": "w5"}, "train_dataset")
    with pytest.raises(ValueError, match=r"eval_dataset\.prompt holds chat turns, but the tokenizer has no chat templ"):
        prompts.check({"prompt": [{"role": "user", "content": "w5"}]}, "eval_dataset")
    with pytest.raises(ValueError, match="a prompt has no tokens: ''"):
        prompts([{"prompt": "w5"}, {"prompt": ""}])
    with pytest.raises(ValueError, match="`prompt` must be text or a list of chat turns, found int"):
        prompts([{"prompt": 5}])
    prompts.num_embeddings = 64
    assert prompts([{"input_ids": [63]}]) == [[63]]
    with pytest.raises(ValueError, match="a prompt holds token id 64, but the model has 64 embeddings"):
        prompts([{"input_ids": [5, 64]}])
