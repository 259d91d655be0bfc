"""Pre-training: it learns, repeatably, and leaves a model that writes the corpus' sentences and stops."""

import re
from itertools import pairwise

import pytest
import torch

from trl_alpharl.builtin import builtin_dataset, load_builtin, positive_words
from trl_alpharl.builtin.corpus import stories
from trl_alpharl.builtin.pretrain import encode, pretrain
from trl_alpharl.builtin.tokenizer import build_tokenizer


def perplexity(model, tokenizer):
    """Of unseen stories, from the definition: exp of the mean negative log-prob of each next token, <eos> included."""
    total, count = 0.0, 0
    for text in stories(100, seed=77):
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            logps = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total -= logps[:-1].gather(1, ids[1:, None]).sum().item()
        count += len(ids) - 1
    return torch.tensor(total / count).exp().item()


def test_a_batch_ends_every_story_and_skips_padding():
    tokenizer = build_tokenizer(["Anna went to the market."])
    batch = encode(["Anna went.", "Anna went to the market."], tokenizer)
    short = [*tokenizer("Anna went.")["input_ids"], 1]
    assert batch["input_ids"].tolist()[0] == [*short, 0, 0, 0]
    assert batch["labels"].tolist()[0] == [*short, -100, -100, -100]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 3, [1] * 7]
    assert batch["labels"][1, -1] == tokenizer.eos_token_id


def test_a_short_run_learns_repeatably_and_leaves_the_global_generator():
    before = torch.get_rng_state()
    model, tokenizer = pretrain(seed=0, story_count=640)
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    # Guessing among all words would give len(tokenizer), about 260; word frequencies alone about 65.
    assert perplexity(model, tokenizer) < 30
    again, _ = pretrain(seed=0, story_count=640)
    for one, other in zip(model.parameters(), again.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_callers_threads_do_not_change_the_weights_and_are_kept():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two, _ = pretrain(seed=0, story_count=96)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        one, _ = pretrain(seed=0, story_count=96)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return load_builtin(0, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def samples(trained):
    """(texts, completions, ended) for four completions of each test prompt, at most 24 tokens, temperature 1."""
    model, tokenizer = trained
    prompts = list(builtin_dataset()[1]["prompt"]) * 4
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=24)[:, batch["input_ids"].shape[1] :]
    completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [p + c for p, c in zip(prompts, completions)], completions, (ids == tokenizer.eos_token_id).any(1).tolist()


@pytest.mark.slow
def test_perplexity(trained):
    assert perplexity(*trained) < 3.4


@pytest.mark.slow
def test_samples_look_like_the_corpus_and_end(samples):
    texts, _, ended = samples
    assert sum(ended) / len(ended) > 0.9

    def pairs(text):
        marks = re.findall(r"\w+|[.,!]", text)
        return set(pairwise(marks))

    known = set().union(*(pairs(text) for text in stories(20_000, seed=78)))
    assert sum(pairs(text) <= known for text in texts) / len(texts) > 0.85


@pytest.mark.slow
def test_the_reward_has_signal_and_headroom_at_the_start(samples):
    _, completions, _ = samples
    scores = torch.tensor(positive_words(prompts=[], completions=completions))
    assert -0.5 < scores.mean() < 0.5
    assert scores.std() > 0.8
    standard_error = scores.std() * (2 / 64) ** 0.5  # of a difference between two means over the 64 test prompts
    assert 3 - scores.mean() > 8 * standard_error
