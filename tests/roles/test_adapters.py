"""Role switching on PEFT models: what may be an adapter, what each role runs on, and what stays untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from trl_alpharl.roles import adapters
from trl_alpharl.roles.actor_critic import ActorCritic

IDS = torch.tensor([[5, 9, 11, 30, 7, 2]])


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes})


def train_a_little(model: PeftModel, adapter: str = "default") -> PeftModel:
    """Move every weight of an adapter, as training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in adapters.adapter_parameters(model, adapter):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def role_logits(roles: ActorCritic, role: str) -> torch.Tensor:
    with roles.switch.using(roles.adapters[role]):
        return logits(roles.policy.get_base_model())


def trainable(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


# What PEFT must offer


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 6]}])
def test_peft_still_has_the_private_attributes_that_the_switch_sets(model, changes):
    """`set_adapter` and `disable_adapter` move these two flags; a PEFT that renames them must fail here."""
    model = get_peft_model(model, lora(**changes))
    layers = [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    assert layers
    for layer in layers:
        assert layer._disable_adapters is False
        assert layer.active_adapters == ["default"]
        assert "default" in layer._get_available_adapters()
        if isinstance(layer, AuxiliaryTrainingWrapper):
            assert "default" in layer._adapters
    with model.disable_adapter():
        assert all(layer._disable_adapters for layer in layers)


def test_a_peft_without_them_is_refused(model, monkeypatch):
    model = get_peft_model(model, lora())
    monkeypatch.delattr(BaseTunerLayer, "_disable_adapters")
    for module in model.modules():
        module.__dict__.pop("_disable_adapters", None)
    with pytest.raises(AttributeError, match="PEFT's Linear has no `_disable_adapters`; this PEFT is not supported"):
        adapters.RoleSwitch(model)


# The switch


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 9]}])
def test_the_switch_answers_as_pefts_own_set_adapter_and_disable_adapter(model, changes):
    model = train_a_little(get_peft_model(model, lora(**changes)))
    model.add_adapter("other", lora(target_modules=["k_proj"]))  # other layers, no extra modules
    train_a_little(model, "other")
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        expected[name] = logits(model)
    with model.disable_adapter():
        expected[None] = logits(model)
    assert not torch.equal(expected["default"], expected["other"])
    adapters.set_trainable(model, ["default", "other"])
    before = trainable(model)
    switch = adapters.RoleSwitch(model)
    for name in ("other", None, "default", None, "other", "default"):
        switch.use(name)
        assert switch.current == name
        assert torch.equal(logits(model), expected[name]), name
    assert trainable(model) == before


def test_using_restores_what_was_active_also_after_an_error(model):
    switch = adapters.RoleSwitch(get_peft_model(model, lora()))
    switch.use("default")
    with pytest.raises(RuntimeError), switch.using(None):
        assert switch.current is None
        raise RuntimeError
    assert switch.current == "default"


def test_a_model_without_peft_has_nothing_to_switch(model):
    before = logits(model)
    switch = adapters.RoleSwitch(model)
    switch.use(None)
    assert torch.equal(logits(model), before)


def test_after_a_run_the_model_merges_as_peft_does_it(model):
    """PEFT looks `modules_to_save` up by the active adapter's name: the switch must leave it in PEFT's form."""
    roles = ActorCritic(train_a_little(get_peft_model(model, lora(modules_to_save=["lm_head"]))), critic="adapter")
    role_logits(roles, "reference")
    expected = role_logits(roles, "policy")
    torch.testing.assert_close(logits(roles.policy.merge_and_unload()), expected, atol=1e-5, rtol=1e-5)


# The reference


FRESH = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [5, 9]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}
MOVES_BASE = {"pissa": {"init_lora_weights": "pissa"}, "olora": {"init_lora_weights": "olora"}}
ANY_START = {**FRESH, **MOVES_BASE, "random": {"init_lora_weights": False}}


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does(model, name):
    base = logits(model)
    model = get_peft_model(model, lora(**FRESH[name]))
    assert torch.equal(logits(model), base)
    assert adapters.changes_nothing(model, "default")
    train_a_little(model)
    assert not torch.equal(logits(model), base)
    assert not adapters.changes_nothing(model, "default")


@pytest.mark.parametrize("name", [*MOVES_BASE, "random"])
def test_an_adapter_that_starts_with_a_part_of_the_weights_changes_something(model, name):
    assert not adapters.changes_nothing(get_peft_model(model, lora(**ANY_START[name])), "default")


@pytest.mark.parametrize("changes", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5]}])
def test_changed_copies_of_modules_or_tokens_alone_are_a_change(model, changes):
    model = get_peft_model(model, lora(**changes))
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens_delta" in name:
            parameter.data[0, 0] += 1e-3
    assert not adapters.changes_nothing(model, "default")


TIED = {
    "modules_to_save": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [5, 9]},
}
EVERY = [(name, False) for name in ANY_START] + [(name, True) for name in TIED]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("critic", ["shared", "adapter"])
@pytest.mark.parametrize("name, tied", EVERY)
def test_policy_and_reference_answer_as_the_model_that_came_in(model, name, tied, critic, trained):
    """KL(0) = 0 for every kind of adapter, and building the roles moves no weight that the policy runs on."""
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model = get_peft_model(model, lora(**(TIED if tied else ANY_START)[name]))
    if trained:
        train_a_little(model)
    came = logits(model)
    roles = ActorCritic(model, critic=critic)
    assert torch.equal(role_logits(roles, "policy"), came)
    assert torch.equal(role_logits(roles, "reference"), came)
    train_a_little(roles.policy)
    assert not torch.equal(role_logits(roles, "policy"), came)
    assert torch.equal(role_logits(roles, "reference"), came)  # the reference stays when the policy moves


@pytest.mark.parametrize(
    "config",
    [IA3Config(target_modules=["v_proj"], feedforward_modules=[]), LoHaConfig(r=4, target_modules=["q_proj"])],
    ids=["ia3", "loha"],
)
def test_other_adapter_types_get_a_copied_reference(model, config):
    came = logits(model)
    roles = ActorCritic(get_peft_model(model, config), critic="adapter")
    assert roles.adapters["reference"] == adapters.REFERENCE_ADAPTER
    train_a_little(roles.policy)
    assert not torch.equal(role_logits(roles, "policy"), came)
    assert torch.equal(role_logits(roles, "reference"), came)


def test_a_trained_adapter_that_peft_cannot_repeat_is_refused(model):
    """peft ties the head's factors to the embedding's for a model's first adapter only."""
    model.config.tie_word_embeddings = True
    model.tie_weights()
    changes = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    ActorCritic(get_peft_model(copy.deepcopy(model), lora(**changes)), critic="adapter")  # fresh, it needs no copy
    model = get_peft_model(model, lora(**changes))
    with pytest.raises(ValueError, match=r"cannot be copied as the reference: .*lm_head.lora_A.* pass ref_model"):
        ActorCritic(train_a_little(model))


def test_case_12_a_trained_adapter_gets_one_frozen_copy_and_no_second_model(model):
    model = train_a_little(get_peft_model(model, lora(r=2)))
    adapter_size = sum(p.numel() for _, p in adapters.adapter_parameters(model, "default"))
    before = sum(p.numel() for p in model.parameters())
    roles = ActorCritic(model)
    assert roles.reference is None and roles.adapters["reference"] == "reference"
    assert sum(p.numel() for p in roles.policy.parameters()) == before + adapter_size
    frozen = dict(adapters.adapter_parameters(roles.policy, "reference"))
    assert frozen and not any(p.requires_grad for p in frozen.values())


# The critic's adapter


@pytest.mark.parametrize("name", FRESH)
def test_the_critics_adapter_is_the_identity_at_the_start(model, name):
    base = logits(model)
    roles = ActorCritic(train_a_little(get_peft_model(model, lora(**FRESH[name]))), critic="adapter")
    assert torch.equal(role_logits(roles, "critic"), base)


@pytest.mark.parametrize("excluded", [None, ["k_proj"], r".*\.k_proj"])
def test_the_critic_has_no_adapter_on_the_head(model, excluded):
    config = lora(target_modules=["q_proj", "k_proj", "lm_head"], exclude_modules=excluded)
    roles = ActorCritic(get_peft_model(model, config), critic="adapter")
    places = {
        adapter: {name.split(".lora_")[0] for name, _ in adapters.adapter_parameters(roles.policy, adapter)}
        for adapter in ("default", "critic")
    }
    assert places["critic"] == {name for name in places["default"] if "lm_head" not in name}
    assert any("lm_head" in name for name in places["default"])
    assert any("k_proj" in name for name in places["critic"]) == (excluded is None)


@pytest.mark.parametrize("name", MOVES_BASE)
def test_where_base_weights_moved_into_the_adapter_the_critic_starts_with_them(model, name):
    model = get_peft_model(model, lora(**MOVES_BASE[name]))
    came = logits(model)
    roles = ActorCritic(model, critic="adapter")
    assert torch.equal(role_logits(roles, "critic"), came)
    config = roles.policy.peft_config["critic"]
    assert config.init_lora_weights == name  # loading must prepare the base weights in the same way


def test_policy_and_critic_learn_and_nothing_else(model):
    model = train_a_little(get_peft_model(model, lora(modules_to_save=["lm_head"])))
    roles = ActorCritic(model, critic="adapter")
    learning = {name for name, grad in trainable(roles.policy).items() if grad}
    assert learning == {
        name for name, _ in roles.policy.named_parameters() if ".default." in name or ".critic." in name
    }
    assert not any("modules_to_save.critic" in name for name in learning)
    own = {id(p) for p in roles.critic_parameters()}
    assert own == {id(p) for n, p in roles.policy.named_parameters() if ".critic." in n} | {id(roles.value_head.weight)}


# Names


def test_the_users_adapters_by_name(model):
    model = get_peft_model(model, lora(), adapter_name="sft")
    model.add_adapter("start", lora())
    for name in ("sft", "start"):
        train_a_little(model, name)
    model.set_adapter("start")
    expected = logits(model)
    roles = ActorCritic(model, model_adapter_name="sft", ref_adapter_name="start")
    assert roles.adapters == {"policy": "sft", "reference": "start", "critic": None}
    assert torch.equal(role_logits(roles, "reference"), expected)
    assert not any(p.requires_grad for n, p in roles.policy.named_parameters() if ".start." in n)
    assert all(p.requires_grad for n, p in roles.policy.named_parameters() if ".sft." in n)


def test_names_that_cannot_work_are_one_line_each(model):
    plain = copy.deepcopy(model)
    model = get_peft_model(model, lora())
    for kwargs, line in (
        ({"model_adapter_name": "x"}, r"model_adapter_name is 'x', but the model's adapters are \['default'\]"),
        ({"ref_adapter_name": "x"}, "ref_adapter_name is 'x', but the model's adapters are"),
        ({"ref_adapter_name": "default"}, "ref_adapter_name is 'default', the policy itself"),
        ({"ref_adapter_name": "default", "reference": plain}, "ref_adapter_name and ref_model are both set"),
    ):
        with pytest.raises(ValueError, match=line):
            ActorCritic(copy.deepcopy(model), **kwargs)
    for field in ("model_adapter_name", "ref_adapter_name"):
        with pytest.raises(ValueError, match=f"{field} is 'x', but model has no adapters"):
            ActorCritic(plain, **{field: "x"})
    two = copy.deepcopy(model)
    two.add_adapter("other", lora())
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="model has 2 active adapters"):
        ActorCritic(two)


@pytest.mark.parametrize("name, kwargs", [("critic", {"critic": "adapter"}), ("reference", {})])
def test_a_name_that_the_trainer_needs_is_refused_only_where_it_is_needed(model, name, kwargs):
    plain = copy.deepcopy(model)
    with pytest.raises(ValueError, match=f"model already has an adapter named {name!r}"):
        ActorCritic(train_a_little(get_peft_model(model, lora(), adapter_name=name), name), **kwargs)
    roles = ActorCritic(get_peft_model(plain, lora(), adapter_name=name))
    assert roles.adapters["policy"] == name


@pytest.mark.parametrize("name", ["model", "self_attn"])
def test_an_adapter_named_like_a_module_is_refused(model, name):
    """Its parameters could not be told from the base model's: everything would train."""
    with pytest.raises(ValueError, match=f"adapter {name!r} is named like one of the model's own modules"):
        ActorCritic(get_peft_model(model, lora(), adapter_name=name))


# Refusals


@pytest.mark.parametrize(
    "config, line",
    [
        (lora(bias="all"), "peft_config.bias is 'all'"),
        (lora(bias="lora_only"), "peft_config.bias is 'lora_only'"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING is not supported"),
        (lora(alora_invocation_tokens=[5], task_type="CAUSAL_LM"), "peft_config.alora_invocation_tokens"),
    ],
    ids=["bias all", "bias lora_only", "prompt tuning", "alora"],
)
def test_adapters_that_would_train_wrong_are_refused(model, config, line):
    with pytest.raises(ValueError, match=line):
        ActorCritic(get_peft_model(model, config))


def test_lora_on_expert_parameters_is_refused():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    experts = MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    )
    config = lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(ValueError, match=r"peft_config\.target_parameters"):
        ActorCritic(get_peft_model(experts, config))


def test_trainable_base_weights_beside_an_adapter_are_refused(model):
    model = get_peft_model(model, lora())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"base parameter '.*norm.weight' is trainable beside the adapter"):
        ActorCritic(model)


def test_a_merged_adapter_is_refused(model):
    model = train_a_little(get_peft_model(model, lora()))
    model.merge_adapter()
    with pytest.raises(ValueError, match="model has a merged adapter"):
        ActorCritic(model)
