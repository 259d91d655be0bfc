"""The policy's weights with its adapter merged in: as PEFT merges for good, and without a trace on the policy."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from trl_alpharl.roles import adapters, merged
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.merged import MergedPolicy, copy_fits, mergeable, merged_adapter


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
    model = get_peft_model(model, copy.deepcopy(config), adapter_name=adapter)
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
    weights, others = first["weights"], second["weights"]
    equal = weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    return equal and all(first[part] == second[part] for part in first if part != "weights")


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


# All layers at once, for rollouts


def logits(policy) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 11, 30], [8, 3, 60, 21]])
    with torch.no_grad():
        return policy(input_ids=ids).logits


class Error(Exception):
    pass


MERGEABLE = {"lora", "dora", "rslora"}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", sorted(MERGEABLE))
def test_the_merged_policy_says_the_same_and_is_whole_afterwards(model, kind, fused):
    roles = ActorCritic(trained(model, KINDS[kind]), critic="adapter", fuse_lora=fused)
    before = state(roles.policy)
    own = logits(roles.policy)
    products = []
    hooks = [m.lora_A.default.register_forward_hook(lambda *_: products.append(1)) for m in lora_layers(roles.policy)]
    with merged_adapter(roles.policy, "default"):
        merged_logits = logits(roles.policy)
    assert not products  # the adapters' own products are gone
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(merged_logits, own, atol=1e-5, rtol=1e-5)
    assert same(state(roles.policy), before)
    assert torch.equal(logits(roles.policy), own)
    with roles.switch.using(None):
        assert (logits(roles.policy) - own).abs().max() > 0.01


def lora_layers(policy) -> list:
    return [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]


def test_adapters_on_some_layers_only(model):
    policy = trained(model, lora(layers_to_transform=[1]))
    policy.add_adapter("other", lora(layers_to_transform=[0]))  # a layer that the policy's adapter does not touch
    own, before = logits(policy), state(policy)
    with merged_adapter(policy, "default"):
        torch.testing.assert_close(logits(policy), own, atol=1e-5, rtol=1e-5)
    assert same(state(policy), before)


def test_bf16_bases_come_back_bit_for_bit(model):
    policy = trained(model.bfloat16(), lora())
    before, own = state(policy), logits(policy)
    for _ in range(3):
        with merged_adapter(policy, "default"):
            assert not torch.equal(lora_layers(policy)[0].weight, before["weights"][BASE])
    assert same(state(policy), before) and torch.equal(logits(policy), own)


BASE = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def test_an_error_inside_restores_the_policy(model):
    policy = trained(model, lora())
    before = state(policy)
    with pytest.raises(Error), merged_adapter(policy, "default"):
        raise Error
    assert same(state(policy), before)


def test_an_error_while_merging_restores_the_layers_before_it(model, monkeypatch):
    policy = trained(model, lora())
    before = state(policy)

    def broken(**kwargs):
        raise Error

    monkeypatch.setattr(lora_layers(policy)[2], "merge", broken)
    with pytest.raises(Error), merged_adapter(policy, "default"):
        pass
    assert same(state(policy), before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_merged(model, kind):
    assert mergeable(trained(model, KINDS[kind])) == (kind in MERGEABLE)


@pytest.mark.parametrize("change", ["lora_bias", "quantized", "head", "tied", "tied, adapters elsewhere", "critic"])
def test_weights_that_something_else_uses_or_that_would_be_rounded_are_not_merged(model, change):
    config = lora()
    if change.startswith("tied"):
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    if change in ("head", "tied"):
        config = lora(target_modules=["q_proj", "lm_head"])
    if change == "lora_bias":
        config = lora(lora_bias=True)
    policy = trained(model, config)
    if change == "critic":
        policy.add_adapter("critic", lora(modules_to_save=["lm_head"]))
    model.is_quantized = change == "quantized"
    assert mergeable(policy) == (change in ("head", "tied, adapters elsewhere"))


def test_a_copy_fits_into_half_of_what_is_free(model, monkeypatch):
    policy = trained(model, lora())
    assert copy_fits(policy)
    monkeypatch.setattr(merged, "unwrap_peft", lambda _: SimpleNamespace(device=torch.device("cuda")))
    needed = 2 * 2 * 64 * 64 * 4  # bytes: two layers, q and v, fp32
    for free, fits in ((2 * needed, False), (2 * needed + 2, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert copy_fits(policy) == fits


@pytest.mark.parametrize("wanted, expected", [(None, True), (True, True), (False, False)])
def test_rollouts_sample_from_merged_weights(model, wanted, expected):
    roles = ActorCritic(trained(model, lora()), critic="adapter", merge_in_rollouts=wanted).train()
    before = state(roles.policy)
    with roles.sampling():
        assert [layer.merged_adapters for layer in lora_layers(roles.policy)] == [["default"] if expected else []] * 4
        assert not roles.training and not torch.is_grad_enabled()
    assert same(state(roles.policy), before) and roles.training and torch.is_grad_enabled()
    with pytest.raises(Error), roles.sampling():
        raise Error
    assert same(state(roles.policy), before) and roles.training


def test_a_copy_that_does_not_fit_is_made_only_when_it_is_asked_for(model, monkeypatch):
    monkeypatch.setattr("trl_alpharl.roles.trainer_face.copy_fits", lambda policy: False)
    for wanted in (None, True):
        roles = ActorCritic(trained(copy.deepcopy(model), lora()), merge_in_rollouts=wanted)
        with roles.sampling():
            assert [layer.merged for layer in lora_layers(roles.policy)] == [bool(wanted)] * 4


@pytest.mark.parametrize("kind", ["full", "tokens", "ia3"])
def test_merging_that_cannot_be_is_refused_when_it_is_asked_for(model, kind):
    for wanted in (None, True):
        policy = copy.deepcopy(model) if kind == "full" else trained(copy.deepcopy(model), KINDS[kind])
        if wanted is None:
            with ActorCritic(policy).sampling():
                assert not any(layer.merged for layer in lora_layers(policy))
            continue
        with pytest.raises(ValueError, match="merge_lora_in_rollouts is true, but model has no adapter") as error:
            ActorCritic(policy, merge_in_rollouts=True)
        assert "\n" not in str(error.value)


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
