"""Completions by vLLM: the fake has the shape of TRL's class; TRL's own class runs over a fake engine; our side."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import set_seed

from trl_alpharl import _trl
from trl_alpharl.roles.merged import MergedPolicy
from trl_alpharl.rollout.sampler import Sampling
from trl_alpharl.rollout.vllm import VLLMSampler

pytestmark = pytest.mark.trl_compat
HOW = Sampling(response_length=6, temperature=0.7, stop_ids=(1, 9), pad_id=0, chunk_rows=4)
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [11, 12]]
EXAMPLES = [{"prompt": str(number)} for number in range(len(PROMPTS))]


@pytest.fixture
def trls():
    """The module of TRL's `VLLMGeneration`."""
    return importlib.import_module("trl.generation.vllm_generation")


@pytest.fixture
def sampler(fake_vllm, named_model, tokenizer):
    """A factory of samplers from the tiny policy."""

    def make(how=HOW, policy=None, **settings):
        policy = MergedPolicy(named_model, None) if policy is None else policy
        return VLLMSampler(policy, Accelerator(cpu=True), tokenizer, how, settings, seed=3)

    return make


def shape(function) -> list[tuple]:
    """Names, kinds and defaults of a function's arguments."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


# TRL's side


@pytest.mark.parametrize("method", ["__init__", "sync_weights", "generate"])
def test_the_fake_takes_what_trls_class_takes(trls, fake_vllm, method):
    assert shape(getattr(fake_vllm, method)) == shape(getattr(trls.VLLMGeneration, method))


def test_without_vllm_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda: False)
    with pytest.raises(ImportError) as error:
        _trl.vllm_generation()
    message = str(error.value)
    assert "use_vllm" in message and "pip install" in message and "\n" not in message


def test_with_vllm_trls_class_comes_through_the_door(monkeypatch, trls):
    monkeypatch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda: True)
    assert _trl.vllm_generation() is trls.VLLMGeneration


class Engine:
    """What `VLLMGeneration` uses of `vllm.LLM`. Asleep it has no weights. It answers with tokens 5 and 9."""

    def __init__(self, **settings):
        self.settings, self.calls, self.weights = settings, [], {}
        self.llm_engine = SimpleNamespace(model_executor=self)
        self.driver_worker = self.model_runner = self.model = self

    def load_weights(self, weights):
        self.calls.append("load")
        self.weights.update({name: weight.clone() for name, weight in weights})

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def sleep(self, level):
        self.calls.append("sleep")
        self.weights = {}

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append("generate")
        self.asked, self.used = sampling_params, dict(self.weights)
        step = SimpleNamespace(rank=1, logprob=-0.5)
        answer = SimpleNamespace(token_ids=(5, 9), logprobs=[{5: step}, {9: step}])
        return [SimpleNamespace(prompt_token_ids=row["prompt_token_ids"], outputs=[answer]) for row in prompts]


class Client:
    """What `VLLMGeneration` uses of its client: tensors are packed, so many are taken before the first is sent."""

    def __init__(self, **settings):
        self.settings = settings

    def init_communicator(self, device):
        pass

    def update_named_params(self, announced, weights):
        taken = list(weights)
        assert announced == [(name, "float32", list(weight.shape)) for name, weight in taken]
        self.weights = {name: weight.clone() for name, weight in taken}

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, features=None, **asked):
        self.asked, self.used = asked, self.weights
        return {"prompt_ids": prompts, "completion_ids": [[5, 9]] * 4, "logprobs": [[[-0.5], [-0.5]]] * 4}


@pytest.fixture
def adapted(named_model):
    """A policy whose adapter is not called as PEFT would call it."""
    return get_peft_model(named_model, LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="mine")


@pytest.fixture
def over(trls, adapted, tokenizer, monkeypatch):
    """A factory of samplers by TRL's own class, over the engine and the client above."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # it names the process there
    monkeypatch.setattr("trl_alpharl.rollout.vllm.vllm_generation", lambda: trls.VLLMGeneration)
    monkeypatch.setattr(trls, "is_vllm_available", lambda: True)
    monkeypatch.setattr(trls, "empty_cache", lambda: None)
    monkeypatch.setattr(trls, "VLLMClient", Client)
    monkeypatch.setattr(trls, "LLM", Engine, raising=False)
    monkeypatch.setattr(trls, "SamplingParams", lambda **kwargs: kwargs, raising=False)

    def make(**settings):
        return VLLMSampler(MergedPolicy(adapted, "mine"), Accelerator(cpu=True), tokenizer, HOW, settings, seed=3)

    return make


def merged_weights(policy):
    return dict(copy.deepcopy(policy).merge_and_unload().named_parameters())


@pytest.mark.parametrize("settings", [{}, {"enable_sleep_mode": True}, {"mode": "server"}])
def test_trls_own_class_samples_from_the_merged_policy_of_the_moment(over, adapted, settings):
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    base = layer.base_layer.weight.clone()
    sampler = over(**settings)
    engine = sampler.generation.vllm_client if "mode" in settings else sampler.generation.llm
    for step in (1.0, 2.0):
        with torch.no_grad():
            layer.lora_B["mine"].weight.fill_(step)
        rollout, logps = sampler.sample(PROMPTS, EXAMPLES, 0, seed=1)
        expected = merged_weights(adapted)
        assert engine.used.keys() == expected.keys()
        assert all(torch.equal(engine.used[name], expected[name]) for name in expected)
    assert torch.equal(layer.base_layer.weight, base)
    assert rollout.completion_ids.tolist() == [[5, 9]] * 4 and rollout.finished.all()
    assert logps == pytest.approx(4 * 2 * -0.5)
    asked = {**engine.asked, **engine.asked.get("generation_kwargs", {})}
    assert asked["stop_token_ids"] == [1, 9] and asked["ignore_eos"] is True
    assert (asked["temperature"], asked["max_tokens"], asked["n"]) == (0.7, 6, 1)
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert asked.get("seed") is None  # one seed for all prompts would be one noise for all


def test_an_engine_in_this_process_sleeps_between_rollouts_when_asked_to(over, adapted):
    sampler = over(enable_sleep_mode=True, gpu_memory_utilization=0.4, max_num_seqs=8)
    engine = sampler.generation.llm
    assert engine.settings["model"] == adapted.name_or_path
    assert engine.settings["gpu_memory_utilization"] == 0.4 and engine.settings["max_num_seqs"] == 8
    assert engine.settings["quantization"] is None
    for _ in range(2):
        sampler.sample(PROMPTS, EXAMPLES, 0, seed=1)
    assert [call for call in engine.calls if call != "load"] == [
        "sleep",
        *["wake weights", "reset", "wake kv_cache", "generate", "sleep"] * 2,
    ]
    assert engine.calls.count("load") == 2 * len(merged_weights(adapted))


def test_an_address_of_a_server_arrives(over):
    sampler = over(mode="server", server_host="rollouts", server_port=8001, server_timeout=9.0, group_port=51217)
    assert sampler.generation.vllm_client.settings == {
        "base_url": "http://rollouts:8001",
        "group_port": 51217,
        "connection_timeout": 9.0,
    }


# Our side


def test_answers_end_at_a_stop_token_or_at_response_length(sampler):
    ends = set()
    for seed in range(8):
        rollout, _ = sampler().sample(PROMPTS, EXAMPLES, 4, seed)
        assert rollout.index == 4 and rollout.examples == EXAMPLES and rollout.behavior_logps is None
        assert [row[mask].tolist() for row, mask in zip(rollout.prompt_ids, rollout.prompt_mask)] == PROMPTS
        rows = zip(rollout.completion_ids, rollout.completion_mask, rollout.finished)
        for ids, mask, finished in rows:
            length = int(mask.sum())
            assert mask[:length].all() and not ids[length:].any()
            assert not set(ids[: length - 1].tolist()) & {1, 9}
            assert bool(finished) is (int(ids[length - 1]) in (1, 9)) and (finished or length == 6)
            ends.add(bool(finished))
    assert ends == {False, True}


def test_without_stop_tokens_every_answer_has_response_length(sampler):
    how = Sampling(response_length=6, temperature=0.7, stop_ids=(), pad_id=0, chunk_rows=4)
    rollout, _ = sampler(how).sample(PROMPTS, EXAMPLES, 0, 1)
    assert rollout.completion_mask.all() and rollout.completion_ids.shape == (4, 6)
    assert not rollout.finished.any()


def test_pad_equal_to_eos_is_told_by_position(sampler):
    """Case of a tokenizer whose pad token ends answers: the end counts, what fills the row does not."""
    how = Sampling(response_length=6, temperature=5.0, stop_ids=tuple(range(32)), pad_id=1, chunk_rows=4)
    rollout, _ = sampler(how).sample(PROMPTS * 4, EXAMPLES * 4, 0, 1)
    lengths = rollout.completion_mask.sum(1)
    assert len(set(lengths.tolist())) > 1 and lengths.min() >= 1
    last = rollout.completion_ids.gather(1, lengths.unsqueeze(1) - 1)[:, 0]
    assert (last[rollout.finished] < 32).all()
    assert (rollout.completion_ids[~rollout.completion_mask] == 1).all()


def test_a_draw_follows_from_its_seed_and_two_rows_of_one_prompt_differ(sampler):
    first, second, other = (sampler().sample(PROMPTS, EXAMPLES, 0, seed)[0] for seed in (5, 5, 6))
    assert torch.equal(first.completion_ids, second.completion_ids)
    assert first.completion_ids.tolist() != other.completion_ids.tolist()
    assert first.completion_ids[0].tolist() != first.completion_ids[2].tolist()


def test_global_generators_go_on_as_if_nothing_had_been_drawn(sampler):
    def draws():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    set_seed(1)
    expected = draws()
    set_seed(1)
    sampler().sample(PROMPTS, EXAMPLES, 0, 2**62)  # longer than numpy takes
    assert draws() == expected


def test_weights_are_sent_before_each_draw(sampler, named_model):
    own = sampler()
    for _ in range(2):
        with torch.no_grad():
            named_model.lm_head.weight.mul_(1.5)
        own.sample(PROMPTS, EXAMPLES, 0, 1)
        assert torch.equal(own.generation.own.lm_head.weight, named_model.lm_head.weight)
    assert own.generation.calls == ["sync", "generate"] * 2


def test_the_trainers_autocast_does_not_round_what_the_engine_computes(sampler):
    _, logps = sampler().sample(PROMPTS, EXAMPLES, 0, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert sampler().sample(PROMPTS, EXAMPLES, 0, 1)[1] == logps


def test_a_context_too_short_is_one_line(sampler):
    with pytest.raises(ValueError) as error:
        sampler(HOW, max_model_length=5).sample(PROMPTS, EXAMPLES, 0, 1)
    message = str(error.value)
    assert "raise vllm_max_model_length" in message and "up to 9 tokens" in message and "\n" not in message


def test_a_log_prob_that_is_not_a_number_shows(sampler):
    own = sampler()
    own.generation.generate = lambda *args: (PROMPTS, [[9]] * 4, [[[None]], *[[[-0.5]]] * 3], None)
    assert np.isnan(own.sample(PROMPTS, EXAMPLES, 0, 1)[1])
