"""The embedded tokenizer: exact round trip, distinct special tokens, nothing added."""

import pytest
from transformers import AutoTokenizer

from trl_alpharl.builtin.corpus import openings, stories
from trl_alpharl.builtin.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(stories(4000, seed=0))


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "<unk>"]) == [0, 1, 2]
    assert tokenizer.padding_side == "left"


def test_decoding_restores_unseen_texts(tokenizer):
    for text in stories(300, seed=9) + openings(300, seed=9):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {0, 1, 2}


def test_a_prompt_and_its_completion_join(tokenizer):
    """The completion's first token carries the space: RL decodes completions alone."""
    text = "Anna went to the market and felt happy."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids[:5]) + tokenizer.decode(ids[5:]) == text
    assert tokenizer.decode(ids[5:]) == " and felt happy."


def test_one_token_a_word_or_mark(tokenizer):
    assert tokenizer.tokenize("The soup was hot, and Anna smiled.") == (
        ["The", " soup", " was", " hot", ",", " and", " Anna", " smiled", "."]
    )


def test_unknown_words_and_special_tokens_in_text(tokenizer):
    assert tokenizer("zebra Anna")["input_ids"][0] == tokenizer.unk_token_id
    assert tokenizer("market<eos>")["input_ids"][-1] == tokenizer.eos_token_id
    ended = tokenizer("Anna went<eos><pad><pad>")["input_ids"]
    assert tokenizer.decode(ended, skip_special_tokens=True) == "Anna went"


def test_left_padding_and_mask(tokenizer):
    batch = tokenizer(["Anna", "Anna went to"], padding=True)
    assert batch["input_ids"][0][:2] == [0, 0]
    assert batch["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


def test_ids_do_not_depend_on_the_order_of_the_texts():
    texts = stories(200, seed=0)
    assert build_tokenizer(texts).get_vocab() == build_tokenizer(texts[::-1]).get_vocab()


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = stories(1, seed=11)[0]
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.padding_side, loaded.pad_token_id, loaded.eos_token_id) == ("left", 0, 1)
