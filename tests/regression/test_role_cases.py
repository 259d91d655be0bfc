"""Cases of public bug reports that concern roles and rollouts, on whole training runs."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, LlamaForCausalLM

from trl_alpharl.records import Rollout
from trl_alpharl.roles import actor_critic
from trl_alpharl.rollout.prompts import pad_left
from trl_alpharl.rollout.sampler import completion_mask

# Metrics that depend on the clock or the machine
NOT_OURS = ("time/", "train_", "memory/", "eps", "response_tokens_per_s")


def answered(trainer, answers: list[list[int]], pad: int = 0) -> None:
    """Make every rollout of a trainer give these answers, ids after the stop included."""

    def explore(prompts, examples, index):
        ids = torch.tensor([answer + [pad] * (6 - len(answer)) for answer in answers])
        generated = torch.tensor([[place < len(answer) for place in range(6)] for answer in answers])
        mask, finished = completion_mask(ids, generated, trainer.sampling.stop_ids)
        prompt_ids, prompt_mask = pad_left(prompts, pad)
        return Rollout(index, prompt_ids, prompt_mask, ids, mask, finished, examples)

    trainer.explore = explore


def our_metrics(trainer) -> list[dict[str, float]]:
    return [{k: v for k, v in log.items() if not k.startswith(NOT_OURS)} for log in trainer.state.log_history]


@pytest.mark.parametrize("merged", [False, None])
def test_case_2_one_copy_of_the_base_in_a_whole_run(trainer, model, lora, merged):
    """Generation, scoring and training of all roles read the weights that the model came with; a merged rollout alone
    has a copy, of the adapted layers, for as long as it lasts."""
    base = {p.data_ptr() for p in model.parameters()}
    seen: set[int] = set()
    copied: set[int] = set()
    generating = False

    def note(module, args):
        place = copied if generating and merged is None else seen
        place.update(p.data_ptr() for p in module.parameters(recurse=False))

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        trainer = trainer(peft_config=lora, critic="adapter", merge_lora_in_rollouts=merged)
        generate = trainer.model.generate

        def watched(*args, **kwargs):
            nonlocal generating
            generating = True
            try:
                return generate(*args, **kwargs)
            finally:
                generating = False

        trainer.model.generate = watched
        trainer.train()
    finally:
        hook.remove()
    own = {p.data_ptr() for p in trainer.model.parameters() if p.requires_grad}
    assert seen <= base | own and len(seen & base) >= 18
    assert bool(copied - base - own) is (merged is None)
    assert {p.data_ptr() for p in trainer.model.parameters()} <= base | own


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in tree_flatten(result)[0]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


def test_case_3_no_tensor_of_all_logits(trainer, model, monkeypatch):
    """Vocabulary 4,096 and 128 new tokens: the logits of a micro-batch would be 2 x 128 x 4,096."""
    chunk = 1 << 17
    chunked = functools.partial(actor_critic.chunked_logps_and_entropy, max_chunk_elements=chunk)
    monkeypatch.setattr(actor_critic, "chunked_logps_and_entropy", chunked)
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "num_hidden_layers": 1, "max_position_embeddings": 512}
    model = LlamaForCausalLM(type(model.config)(**{**model.config.to_dict(), **sizes}))
    trainer = trainer(model=model, response_length=128, stop_token=None, total_episodes=8, num_ppo_epochs=1)
    embeddings = 4096 * 64
    with LargestTensor() as largest:
        trainer.train()
    assert chunk <= largest.elements <= max(chunk, embeddings)
    assert largest.elements < 2 * 128 * 4096 / 2


def test_case_7_what_lies_past_the_end_has_no_effect(trainer):
    """Rows of 1, 2 and 6 tokens against a GAE in a loop, with values of 1e3 past their ends."""
    trainer = trainer(gamma=0.9, lam=0.8, kl_coef=0.3)
    lengths = [1, 2, 6, 1, 2, 6, 3, 6]
    answered(trainer, [[9] * (length - 1) + [1 if length < 6 else 9] for length in lengths])
    scored = trainer.score(trainer.rollout())
    mask = scored.rollout.completion_mask
    assert mask.sum(1).tolist() == lengths
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(mask.shape, generator=generator)
    reference = scored.ref_per_token_logps - 0.1 * torch.rand(mask.shape, generator=generator)
    experience = trainer.advantages(
        replace(
            scored,
            values=values.masked_fill(~mask, 1e3),
            ref_per_token_logps=reference.masked_fill(~mask, -1e3),
        )
    )
    returns, raw = [], []
    for row, length in enumerate(lengths):
        after, later, gains = 0.0, 0.0, []
        for place in reversed(range(length)):
            reward = -0.3 * float(scored.old_per_token_logps[row, place] - reference[row, place])
            reward += float(scored.scores[row]) if place == length - 1 else 0.0
            delta = reward + 0.9 * after - float(values[row, place])
            later = delta + 0.9 * 0.8 * later
            after = float(values[row, place])
            gains.insert(0, later)
        raw += gains
        returns += [gain + float(value) for gain, value in zip(gains, values[row])]
    torch.testing.assert_close(experience.returns[mask], torch.tensor(returns), atol=1e-5, rtol=1e-5)
    raw = torch.tensor(raw)
    torch.testing.assert_close(experience.advantages[mask], (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=1e-4)
    assert not experience.returns[~mask].any() and not experience.advantages[~mask].any()


def test_case_9_the_tokenizers_padding_side_changes_nothing(trainer, model, tokenizer):
    logs = []
    for side in ("left", "right"):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.padding_side = side
        run = trainer(model=copy.deepcopy(model), processing_class=tokenizer, response_length=4)
        run.train()
        logs.append(our_metrics(run))
    assert logs[0] == logs[1] and "objective/kl" in logs[0][0]


def test_case_10_with_pad_as_eos_the_eos_is_trained(trainer, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = trainer(processing_class=tokenizer, total_episodes=8, num_ppo_epochs=1, kl_coef=0.0, lam=0.5)
    assert trainer.sampling.pad_id == 1
    answered(trainer, [[5, 1]] * 4 + [[9, 1]] * 4, pad=1)
    seen = []
    loss, advantages = trainer.policy_loss, trainer.advantages

    def noting(stats, chunk, experience, tokens):
        stats.per_token_logps.retain_grad()
        seen.append((chunk, stats.per_token_logps, int(tokens)))
        return loss(stats, chunk, experience, tokens)

    trainer.policy_loss = noting
    kept = []
    trainer.advantages = lambda scored: kept.append(advantages(scored)) or kept[-1]
    trainer.train()
    assert kept[0].token_rewards[:, :3].tolist() == [[0, 1, 0]] * 4 + [[0, 0, 0]] * 4  # the score is at index 1
    for chunk, logps, tokens in seen:
        assert chunk.completion_ids[:, 1].eq(1).all() and chunk.completion_mask.sum(1).tolist() == [2, 2]
        assert logps.grad[:, 1].abs().min() > 1e-4 and tokens == 16
    assert trainer.state.log_history[0]["val/num_eos_tokens"] == 8


KL_0 = {
    "full": None,
    "fresh": {},
    "case 13: dropout": {"lora_dropout": 0.1},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", KL_0)
def test_cases_12_and_13_the_kl_is_0_before_the_first_step(trainer, model, kind, trained):
    """Also with an adapter that came trained (TRL 1.12: 0.094)."""
    if KL_0[kind] is not None:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **KL_0[kind]))
    if trained:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    trainer = trainer(
        model=model,
        total_episodes=16,
        num_ppo_epochs=1,
        learning_rate=1e-2,
        reward_funcs=lambda completions, **kwargs: [float(at) for at in range(len(completions))],  # some advantage
    )
    trainer.train()
    kl = [log["objective/kl"] for log in trainer.state.log_history if "objective/kl" in log]
    assert kl[0] == 0.0 and abs(kl[1]) > 1e-6


@pytest.mark.parametrize("critic", ["shared", "adapter", "model"])
def test_cases_17_and_29_nf4_with_lora_trains_adapters_and_critic_alone(
    trainer, model, classifier, lora, tmp_path, critic
):
    model.save_pretrained(tmp_path / "base")
    classifier.save_pretrained(tmp_path / "critic")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    load = functools.partial(dict, quantization_config=nf4, dtype=torch.bfloat16)
    knobs = {"critic": critic} if critic != "model" else {}
    if critic == "model":  # a quantized critic without an adapter gets one
        knobs["value_model"] = type(classifier).from_pretrained(tmp_path / "critic", **load())
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **load())
    trainer = trainer(model=policy, peft_config=lora, total_episodes=24, num_ppo_epochs=1, **knobs)
    roles = trainer.model
    learns = {name for name, parameter in roles.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in roles.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 3
    moved = {name for name, parameter in roles.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == learns and any("lora_B" in name for name in moved)
    head = "score.modules_to_save" if critic == "model" else "value_head"
    assert any(head in name for name in moved)
    assert sum(isinstance(module, Linear4bit) for module in roles.modules()) == 14 * (2 if critic == "model" else 1)
    if roles.value_head is not None:
        assert roles.value_head.weight.dtype == torch.float32


def test_case_18_a_value_model_with_lora_trains(trainer, classifier):
    critic = get_peft_model(classifier, LoraConfig(r=4, target_modules=["q_proj"], task_type=TaskType.SEQ_CLS))
    before = {name: parameter.detach().clone() for name, parameter in critic.named_parameters()}
    trainer(value_model=critic).train()
    moved = {name for name, parameter in critic.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name for name in moved) and any("score" in name for name in moved)


def test_case_27_the_saved_generation_config_keeps_eos(trainer, model, tmp_path):
    model.generation_config = GenerationConfig(eos_token_id=[1, 9], pad_token_id=0, top_p=0.5, do_sample=True)
    trainer = trainer()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert saved.eos_token_id == [1, 9] and saved.top_p == 0.5
    assert trainer.sampling.stop_ids == (1, 9)
