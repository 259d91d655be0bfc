"""What is refused or repaired before anything runs."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config

from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.prepare import (
    disable_dropout,
    first_bad_parameter,
    freeze,
    is_quantized,
    refuse_offloaded,
    refuse_unsupported,
)


def adapted(model, task_type="CAUSAL_LM", **changes) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task_type, **changes))


def test_encoder_decoders_are_refused_from_the_config():
    with pytest.raises(ValueError, match="model: encoder-decoder models are not supported"):
        refuse_unsupported(T5Config(), "model")
    refuse_unsupported(GPT2Config(), "model")


# Offloading (trap A4)


@pytest.mark.parametrize("wrap_first", [True, False])
def test_offloaded_models_are_refused_before_and_after_adapters(model, tmp_path, wrap_first):
    model.eval()
    if wrap_first:
        model = adapted(model)
    cpu_offload(model if wrap_first else model.model, execution_device="cpu")
    if not wrap_first:
        model = adapted(model)
    with pytest.raises(ValueError, match="model has offloaded layers, which give adapters no gradients"):
        ActorCritic(model)


def test_disk_offload_behind_another_hook_is_refused(model, tmp_path):
    from accelerate.hooks import ModelHook, add_hook_to_module

    disk_offload(model, str(tmp_path), execution_device="cpu")
    for module in model.modules():  # append=True makes a SequentialHook of both
        add_hook_to_module(module, ModelHook(), append=True)
    with pytest.raises(ValueError, match="ref_model has offloaded layers"):
        refuse_offloaded(model, "ref_model")


def test_device_maps(model):
    for device_map in ({"": "cpu"}, {"": 0}, {"model": 0, "lm_head": 1}):
        model.hf_device_map = device_map
        refuse_offloaded(model, "model")
    for device_map in ({"model": 0, "lm_head": "cpu"}, {"model": "cpu", "lm_head": "disk"}, {"": "disk"}):
        model.hf_device_map = device_map
        with pytest.raises(ValueError, match="value_model is dispatched to"):
            refuse_offloaded(model, "value_model")


# Dropout


def test_every_source_of_noise_is_off():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.router_jitter_noise = 0.1
            self.layerdrop = 0.2
            self.attention_dropout = 0.3
            self.dropout_scale_name = "kept"
            self.drop = nn.Dropout(0.4)

    module = Router()
    disable_dropout(module)
    assert (module.router_jitter_noise, module.layerdrop, module.attention_dropout, module.drop.p) == (0, 0, 0, 0)
    assert module.dropout_scale_name == "kept"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_case_13_two_training_forwards_agree_in_spite_of_dropout(attention):
    """GPT-2's default dropout in residuals, embeddings and attention, and LoRA's own."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_implementation=attention)
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    model = get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.5, init_lora_weights=False)
    )
    ids = torch.arange(2, 12).unsqueeze(0)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    roles = ActorCritic(model, critic="adapter").train()
    for adapter in roles.adapters.values():
        with roles.switch.using(adapter):
            inner = roles.policy.get_base_model()
            assert torch.equal(inner(input_ids=ids).logits, inner(input_ids=ids).logits)


# Roles that would not learn, or would stop another from learning


def test_a_model_in_which_nothing_learns_is_refused(model, classifier):
    with pytest.raises(ValueError, match="value_model has no trainable parameter"):
        ActorCritic(model, value_model=freeze(classifier))
    with pytest.raises(ValueError, match="model has no trainable parameter"):
        ActorCritic(freeze(model))


def test_a_critic_adapter_loaded_frozen_learns(model, classifier, tmp_path):
    """PeftModel.from_pretrained freezes what it loads; as value_model it would never move, without an error."""
    adapted(copy.deepcopy(classifier), TaskType.SEQ_CLS).save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(classifier, tmp_path)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    roles = ActorCritic(model, value_model=loaded)
    learning = [name for name, parameter in loaded.named_parameters() if parameter.requires_grad]
    assert any("lora_B" in name for name in learning) and any("score" in name for name in learning)
    assert all(".default." in name for name in learning)
    assert {id(p) for p in roles.critic_parameters()} == {id(p) for p in loaded.parameters() if p.requires_grad}


def test_a_policy_adapter_loaded_frozen_learns(model, tmp_path):
    adapted(copy.deepcopy(model)).save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model, tmp_path)
    ActorCritic(loaded)
    assert all(p.requires_grad == (".default." in name) for name, p in loaded.named_parameters())


def test_a_reference_that_shares_weights_is_refused(model, classifier):
    """`ref_model=base` beside `model=get_peft_model(base)`: freezing the one would freeze the policy's adapter."""
    peft_model = adapted(model)
    with pytest.raises(ValueError, match="ref_model shares weights with model: freezing one would freeze the other"):
        ActorCritic(peft_model, reference=model)
    assert any(parameter.requires_grad for parameter in peft_model.parameters())
    classifier.model = model.model
    with pytest.raises(ValueError, match="ref_model shares weights with value_model"):
        ActorCritic(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)), model, classifier)


def test_full_policies_cannot_have_what_adapters_give(model):
    with pytest.raises(ValueError, match="critic='adapter' needs a LoRA policy"):
        ActorCritic(model, critic="adapter")
    assert not is_quantized(model)
    model.is_quantized = True  # what transformers sets for every quantizer, bitsandbytes or not
    with pytest.raises(ValueError, match="model is quantized, so its weights cannot train; pass peft_config"):
        ActorCritic(model)


def test_a_value_model_needs_a_score_head(model, classifier):
    del classifier.score
    with pytest.raises(ValueError, match="value_model has no `score` head"):
        ActorCritic(model, value_model=classifier)


def test_the_first_bad_parameter_is_named(model):
    assert first_bad_parameter(model) is None
    model.model.norm.weight.data[3] = float("nan")
    assert first_bad_parameter(model) == "model.norm.weight"
    model.model.norm.weight.requires_grad_(False)
    assert first_bad_parameter(model, trainable_only=True) is None
