"""The embedded prompts: fixed, disjoint, all known to the embedded tokenizer."""

from trl_alpharl.builtin import builtin_dataset
from trl_alpharl.builtin.corpus import stories
from trl_alpharl.builtin.tokenizer import build_tokenizer


def test_rows_columns_and_no_overlap():
    train, test = builtin_dataset()
    assert (len(train), len(test)) == (512, 64)
    assert train.column_names == test.column_names == ["prompt"]
    assert len(set(train["prompt"]) | set(test["prompt"])) == 576


def test_always_the_same():
    assert [list(part["prompt"]) for part in builtin_dataset()] == [list(part["prompt"]) for part in builtin_dataset()]


def test_the_tokenizer_knows_every_word():
    tokenizer = build_tokenizer(stories(4000, seed=0))
    for part in builtin_dataset():
        for prompt in part["prompt"]:
            ids = tokenizer(prompt)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert 3 <= len(ids) <= 12
