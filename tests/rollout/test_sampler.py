"""Completions: where they stop, what they are drawn from, and what sampling leaves untouched."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.rollout.exploration import Exploration
from trl_alpharl.rollout.sampler import Sampling, completion_mask, sample, stop_token_ids
from trl_alpharl.rollout.scoring import plan_chunks

PROMPTS = [[5, 9], [7, 8, 11, 30], [4], [60, 3, 2]]
SAMPLING = Sampling(response_length=6, temperature=0.7, stop_ids=(1,), pad_id=0, chunk_rows=8)


def draw(roles, sampling=SAMPLING, seed=3, prompts=PROMPTS):
    return sample(roles, prompts, [{}] * len(prompts), 0, sampling, seed)


def favour(model: nn.Module, token: int, by: float) -> nn.Module:
    """Add a bias to one logit."""
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    head.weight = model.lm_head.weight
    nn.init.zeros_(head.bias)
    head.bias.data[token] = by
    model.lm_head = head
    return model


# Where a completion ends


def test_masks_by_hand():
    ids = torch.tensor([[5, 7, 1, 0, 0], [0, 5, 0, 6, 7], [5, 1, 1, 1, 1], [1, 0, 0, 0, 0], [5, 6, 0, 0, 0]])
    generated = torch.ones_like(ids).bool()
    generated[4, 2:] = False
    mask, finished = completion_mask(ids, generated, (1, 7))
    assert mask.sum(1).tolist() == [2, 5, 2, 1, 2]
    assert finished.tolist() == [True, True, True, True, False]
    mask, finished = completion_mask(ids, generated, ())  # nothing stops: exactly what was generated
    assert torch.equal(mask, generated) and not finished.any()


def test_case_10_pad_is_eos():
    """Padding after the stop is the stop token itself; the first one counts, once a row."""
    ids = torch.tensor([[5, 1, 1, 1], [5, 6, 7, 8], [1, 1, 1, 1]])
    generated = torch.tensor([[True] * 4, [True] * 4, [True, False, False, False]])
    mask, finished = completion_mask(ids, generated, (1,))
    assert mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert finished.tolist() == [True, False, True]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.sets(st.integers(0, 4)),
)
def test_masks_against_a_loop(rows, lengths, stops):
    generated = torch.tensor([[place < length for place in range(5)] for length in lengths[: len(rows)]])
    mask, finished = completion_mask(torch.tensor(rows), generated, sorted(stops))
    for row, length, found, ended in zip(rows, lengths, mask.tolist(), finished.tolist()):
        count, stopped = 0, False
        for token in row[:length]:
            count += 1
            if token in stops:
                stopped = True
                break
        assert found == [place < count for place in range(5)] and ended == stopped


def test_stop_ids_are_the_union_of_what_anyone_calls_an_end():
    tokenizer = SimpleNamespace(eos_token_id=1)
    many = GenerationConfig(eos_token_id=[7, 1, 9])
    assert stop_token_ids("eos", None, tokenizer, GenerationConfig()) == (1,)
    assert stop_token_ids("eos", 5, tokenizer, many) == (1, 5, 7, 9)
    assert stop_token_ids("eos", 0, SimpleNamespace(eos_token_id=None), GenerationConfig(eos_token_id=4)) == (0, 4)
    assert stop_token_ids(None, None, tokenizer, many) == ()
    assert stop_token_ids(None, 5, tokenizer, many) == (5,)
    with pytest.raises(ValueError, match="stop_token is 'eos', but neither the tokenizer nor the generation config"):
        stop_token_ids("eos", None, SimpleNamespace(eos_token_id=None), GenerationConfig())


def test_case_27_generation_stops_when_all_rows_have_ended(model):
    roles = ActorCritic(favour(model, 1, 50.0))
    rollout = draw(roles)
    assert rollout.completion_ids.tolist() == [[1]] * 4
    assert rollout.completion_mask.all() and rollout.finished.all()


@pytest.mark.parametrize("stop, length", [((), 6), ((7,), 6), ((1, 7), 1)])
def test_only_the_stop_ids_end_a_completion(model, stop, length):
    """The generation config's eos is 1; with stop_token=None it must not end anything."""
    roles = ActorCritic(favour(model, 1, 50.0))
    rollout = draw(roles, replace(SAMPLING, stop_ids=stop))
    assert rollout.completion_mask.sum(1).tolist() == [length] * 4
    assert rollout.finished.tolist() == [1 in stop] * 4


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 8])
def test_chunks_of_generation_cover_all_rows(model, chunk_rows):
    roles = ActorCritic(favour(model, 1, 3.0))
    rollout = draw(roles, replace(SAMPLING, chunk_rows=chunk_rows))
    assert rollout.completion_ids.shape[0] == rollout.completion_mask.shape[0] == 4
    rows = zip(rollout.prompt_ids, rollout.prompt_mask)
    assert [ids[mask].tolist() for ids, mask in rows] == PROMPTS
    for ids, mask, finished in zip(rollout.completion_ids, rollout.completion_mask, rollout.finished):
        answer = ids[mask].tolist()
        assert 1 <= len(answer) <= 6 and (answer[-1] == 1) == bool(finished)
        assert 1 not in answer[:-1] and not ids[~mask].any()
        assert finished or len(answer) == 6
    assert len(set(rollout.completion_mask.sum(1).tolist())) > 1


def widths_of_batches(model) -> list[int]:
    """Rows of each forward pass of a model from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    return seen


@pytest.mark.parametrize("explored", [None, Exploration(logit_noise=0.5, epsilon=0.2)])
def test_rows_that_have_ended_leave_the_batch_and_nothing_else_changes(model, explored):
    roles = ActorCritic(favour(model, 1, 2.0))
    seen = widths_of_batches(roles.policy)
    kept = replace(SAMPLING, response_length=30, chunk_rows=16, drop_finished_rows=False)
    prompts = [[row % 60 + 2] * (1 + row % 5) for row in range(16)]
    plain = sample(roles, prompts, [{}] * 16, 0, kept, 3, explored)
    assert set(seen) == {16}
    seen.clear()
    dropped = sample(roles, prompts, [{}] * 16, 0, replace(kept, drop_finished_rows=True), 3, explored)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) > 2 and seen[-1] < 8
    assert torch.equal(plain.completion_ids, dropped.completion_ids)
    assert torch.equal(plain.completion_mask, dropped.completion_mask)
    if explored is not None:
        torch.testing.assert_close(plain.behavior_logps, dropped.behavior_logps, atol=1e-5, rtol=1e-5)


def test_rows_leave_the_batch_of_a_model_without_a_cache(model):
    """What cannot be cut is computed anew."""
    roles = ActorCritic(favour(model, 1, 2.0))
    how = replace(SAMPLING, response_length=30)
    prompts = [[row + 2] * (1 + row % 3) for row in range(8)]
    plain = draw(roles, how, prompts=prompts)
    generate = roles.policy.generate

    def without_cache(**kwargs):
        kwargs["generation_config"].use_cache = False
        found = generate(**kwargs)
        assert found.past_key_values is None
        return found

    roles.policy.generate = without_cache
    seen = widths_of_batches(roles.policy)
    assert torch.equal(draw(roles, how, prompts=prompts).completion_ids, plain.completion_ids)
    assert min(seen) < 4


# What completions are drawn from


def test_tokens_are_drawn_from_the_softmax_at_the_temperature(model):
    roles = ActorCritic(favour(model, 5, 1.5))
    draws = 6000
    sampling = replace(SAMPLING, response_length=1, temperature=1.5, chunk_rows=draws, stop_ids=())
    ids = draw(roles, sampling, prompts=[PROMPTS[1]] * draws).completion_ids[:, 0]
    with torch.no_grad():
        expected = (roles.policy(input_ids=torch.tensor(PROMPTS[1:2])).logits[0, -1] / 1.5).softmax(-1)
    found = torch.bincount(ids, minlength=64) / draws
    errors = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected) / errors).abs().max() < 4.5


class Largest(TorchDispatchMode):
    """The most bytes behind any tensor that an operator gives."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("adapted", [False, True])
def test_the_heads_weights_are_not_copied_for_every_row(model, adapted):
    """The head reads the last of several positions, which lie apart in memory."""
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    roles = ActorCritic(model)
    head = model.get_output_embeddings()
    given = []
    with Largest() as seen:
        handle = head.register_forward_hook(lambda _, inputs, output: given.append(inputs[0]))
        draw(roles, replace(SAMPLING, response_length=3, chunk_rows=32), prompts=[[5, 9, 3, 2]] * 32)
        handle.remove()
    assert given[0].shape == (32, 1, 64) and all(hidden.is_contiguous() for hidden in given)
    assert seen.bytes < 32 * 64 * 64 * 4  # rows x vocabulary x hidden


def test_nothing_stays_on_the_head_after_sampling(model):
    roles = ActorCritic(model)
    head = model.get_output_embeddings()
    with roles.sampling():
        assert len(head._forward_pre_hooks) == 1
    assert not head._forward_pre_hooks
    with pytest.raises(IndexError):
        draw(roles, prompts=[[10**6]])
    assert not head._forward_pre_hooks


USERS = {
    "top_p": 0.1,
    "top_k": 1,
    "min_p": 0.5,
    "typical_p": 0.2,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "do_sample": False,
    "num_beams": 3,
    "min_new_tokens": 6,
    "max_length": 3,
    "suppress_tokens": [5, 6],
    "eos_token_id": [1, 9],
}


@pytest.mark.parametrize("adapted", ["no", "yes", "config on the PeftModel"])
def test_the_users_generation_config_does_not_leak_and_comes_back(model, adapted):
    if adapted != "no":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    roles = ActorCritic(model).train()
    expected = draw(roles).completion_ids
    own = GenerationConfig(**USERS)
    if adapted == "config on the PeftModel":
        model.generation_config = own
    else:
        roles.set_generation_config(own)
    before = own.to_dict()
    assert torch.equal(draw(roles).completion_ids, expected)
    found = model.generation_config
    assert found is own and found.to_dict() == before and found.eos_token_id == [1, 9]
    assert roles.training


def test_the_generation_config_comes_back_after_an_error(model):
    roles = ActorCritic(model).train()
    own = roles.generation_config
    with pytest.raises(IndexError):
        draw(roles, prompts=[[10**6]])
    assert roles.generation_config is own and roles.training


# Randomness


def test_the_draw_depends_on_its_seed_and_leaves_global_randomness_alone(model):
    roles = ActorCritic(model)
    torch.manual_seed(0)
    first = draw(roles).completion_ids
    state = torch.get_rng_state()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert torch.equal(draw(roles).completion_ids, first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(draw(roles, seed=4).completion_ids, first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


# Padding and positions


@pytest.mark.parametrize("left", [0, 1, 3])
def test_case_8_absolute_positions_do_not_see_left_padding(left):
    """GPT-2: a prompt beside one that is `left` tokens longer says and scores the same as alone."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.weight.data.mul_(20)  # positions matter
    roles = ActorCritic(model)
    prompt, greedy = [9, 4, 33], replace(SAMPLING, temperature=1e-4, stop_ids=())
    beside = [[50] * (len(prompt) + left), prompt]
    rollout = draw(roles, greedy, prompts=beside)
    answer = rollout.completion_ids[1].tolist()

    text = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            logits = model(input_ids=torch.tensor([text])).logits[0]
            text.append(int(logits[-1].argmax()))
        logps = (model(input_ids=torch.tensor([text])).logits[0] / 0.7).log_softmax(-1)
    assert answer == text[3:]

    plan = plan_chunks(rollout, [[[0, 1]]], rows=2)
    for chunk in plan.chunks(rollout, [0, 1]):
        stats, reference = roles.score(chunk, temperature=0.7)
        row = chunk.rows.index(1)
        expected = logps[2:-1].gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        torch.testing.assert_close(stats.per_token_logps[row], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(reference[row], expected, atol=1e-5, rtol=1e-5)
