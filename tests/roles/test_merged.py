"""The policy's weights with its adapter merged in: as PEFT merges for good, and without a trace on the policy."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from trl_alpharl.roles import adapters
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.merged import MergedPolicy


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes})


KINDS = {
    "lora": lora(),
    "dora": lora(use_dora=True),
    "rslora": lora(use_rslora=True),
    "embeddings": lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "copied head": lora(modules_to_save=["lm_head"]),
    "tokens": lora(trainable_token_indices=[5, 6]),
    "ia3": IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(r=4, target_modules=["q_proj"]),
}


def trained(model, config, adapter="default"):
    """A policy whose adapter has moved in every weight."""
    model = get_peft_model(model, config, adapter_name=adapter)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in adapters.adapter_parameters(model, adapter):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def state(model) -> dict:
    """All that a pass must leave alone, where weights lie in memory included."""
    layers = [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "places": {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "flags": [(layer._active_adapter, layer._disable_adapters) for layer in layers],
        "merged": [getattr(layer, "merged_adapters", None) for layer in layers],
    }


def same(first: dict, second: dict) -> bool:
    weights, others = first.pop("weights"), second.pop("weights")
    equal = weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    return equal and first == second


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_weights_are_those_of_a_model_that_peft_merged_for_good(named_model, kind):
    policy = trained(named_model, KINDS[kind])
    before = state(policy)
    sent = {name: parameter.data for name, parameter in MergedPolicy(policy, "default").named_parameters()}
    assert same(state(policy), before)
    whole = copy.deepcopy(policy).merge_and_unload()
    expected = dict(whole.named_parameters())
    assert list(sent) == list(expected)
    untouched = dict(type(whole).from_pretrained(named_model.name_or_path).named_parameters())
    assert any(not torch.equal(sent[name], untouched[name]) for name in sent)
    for name, weight in expected.items():
        torch.testing.assert_close(sent[name], weight.data, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_only_the_policys_adapter_counts(named_model, critic):
    """Beside it are a frozen copy of it, the reference, and the critic's; its name is not PEFT's default."""
    policy = trained(named_model, lora(modules_to_save=["lm_head"]), adapter="mine")
    expected = {name: p.clone() for name, p in copy.deepcopy(policy).merge_and_unload().named_parameters()}
    roles = ActorCritic(policy, critic=critic)
    assert roles.adapters["reference"] == "reference"
    if critic == "adapter":
        with torch.no_grad():
            for _, parameter in adapters.adapter_parameters(policy, "critic"):
                parameter.add_(1.0)
    before = state(policy)
    for role in ("policy", "reference", "critic"):  # whichever acts at the moment
        with roles.switch.using(roles.adapters[role]):
            sent = {name: p.data for name, p in MergedPolicy(policy, "mine").named_parameters()}
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], expected[name]) for name in sent)
    assert same(state(policy), before)


def test_bf16_weights_do_not_drift_as_they_do_with_peft_s_own_way_back(named_model):
    policy = trained(named_model.bfloat16(), lora())
    before = state(policy)
    view = MergedPolicy(policy, "default")
    first = {name: parameter.data for name, parameter in view.named_parameters()}
    for _ in range(5):
        again = {name: parameter.data for name, parameter in view.named_parameters()}
    assert same(state(policy), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    before = state(policy)
    policy.merge_adapter()
    policy.unmerge_adapter()
    assert not same(state(policy), before)  # else the test above could not fail


def test_a_reader_that_breaks_off_leaves_the_policy_whole(named_model):
    policy = trained(named_model, lora())
    before = state(policy)
    reading = MergedPolicy(policy, "default").named_parameters()
    for name, parameter in reading:
        if "q_proj" in name:
            assert not torch.equal(parameter.data, before["weights"][f"base_model.model.{name[:-7]}.base_layer.weight"])
            break
    reading.close()
    assert same(state(policy), before)


def test_a_policy_without_an_adapter_is_sent_as_it_is(named_model):
    view = MergedPolicy(named_model, None)
    sent, own = list(view.named_parameters()), list(named_model.named_parameters())
    assert [name for name, _ in sent] == [name for name, _ in own]
    assert all(one is other for (_, one), (_, other) in zip(sent, own))
    assert view.name_or_path == named_model.name_or_path


def test_tied_weights_are_sent_once(named_model):
    named_model.config.tie_word_embeddings = True
    named_model.lm_head.weight = named_model.model.embed_tokens.weight
    policy = get_peft_model(named_model, lora())
    names = [name for name, _ in MergedPolicy(policy, "default").named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))


# Refusals


def refused(policy) -> str:
    with pytest.raises(ValueError) as error:
        MergedPolicy(policy, "default" if hasattr(policy, "peft_config") else None)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_without_a_name_is_refused(model):
    assert "use_vllm: model has no name" in refused(model)


def test_a_quantized_model_is_refused(named_model):
    named_model.is_quantized = True
    assert "use_vllm: model is quantized" in refused(get_peft_model(named_model, lora()))


@pytest.mark.parametrize("changes", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_on_tied_embeddings_is_refused(named_model, changes):
    named_model.config.tie_word_embeddings = True
    assert "use_vllm: the adapter changes embeddings" in refused(get_peft_model(named_model, lora(**changes)))
