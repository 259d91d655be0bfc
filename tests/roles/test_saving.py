"""Round trips: what is saved loads with plain transformers and peft, to the same numbers, and with ours without side
effects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_alpharl.roles import adapters, saving
from trl_alpharl.roles.actor_critic import ActorCritic

IDS = torch.tensor([[5, 9, 11, 30, 7, 2, 40, 41]])


def lora(**changes) -> LoraConfig:
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**defaults, **changes})


def move(model: nn.Module, seed: int = 3) -> None:
    """Change everything that learns, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@torch.no_grad()
def policy_logits(roles: ActorCritic) -> torch.Tensor:
    with roles.switch.using(roles.adapters["policy"]):
        return (
            roles.policy.get_base_model()(input_ids=IDS).logits
            if roles.adapters["policy"]
            else roles.policy(input_ids=IDS).logits
        )


@torch.no_grad()
def values(roles: ActorCritic) -> torch.Tensor:
    """The critic's values before each of the last five tokens."""
    mask, positions = torch.ones_like(IDS), torch.arange(8).unsqueeze(0)
    return roles(IDS, mask, positions, positions[:, 2:7], IDS[:, 3:8]).values


@torch.no_grad()
def classifier_values(classifier: nn.Module) -> torch.Tensor:
    """What a plain sequence classifier says about the same prefixes, one call each."""
    classifier.eval()
    return torch.cat([classifier(input_ids=IDS[:, :end]).logits for end in range(3, 8)], 1)


def loader(model: nn.Module, folder: Path, tied: bool = False) -> Callable:
    """The tiny model in a folder of its own, loaded from there: its adapters then know their base."""
    model.config.tie_word_embeddings = tied
    if tied:
        model.tie_weights()
    model.save_pretrained(folder / "base")
    return lambda kind=AutoModelForCausalLM, **kwargs: kind.from_pretrained(folder / "base", **kwargs)


@pytest.fixture
def base(model, tmp_path):
    return loader(model, tmp_path)


ADAPTERS = {
    "plain": {},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": [5, 9]},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "untyped": {"task_type": None},
}
TIED = {
    "plain": {},
    "modules_to_save": {"modules_to_save": ["embed_tokens"]},
    "modules_to_save, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [5, 9]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "embeddings, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}
EVERY = [(kind, False) for kind in ADAPTERS] + [(kind, True) for kind in TIED]


@pytest.mark.parametrize("critic", ["shared", "adapter"])
@pytest.mark.parametrize("kind, tied", EVERY)
def test_lora_roles_load_with_plain_peft(model, tmp_path, kind, tied, critic):
    base, changes = loader(model, tmp_path, tied), (TIED if tied else ADAPTERS)[kind]
    roles = ActorCritic(get_peft_model(base(), lora(**changes)), critic=critic)
    move(roles)
    saving.save_policy(roles, tmp_path / "run")
    saving.save_critic(roles, tmp_path / "run" / "critic")

    plain = PeftModel.from_pretrained(base(), tmp_path / "run").eval()
    auto = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    for loaded in (plain, auto):
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=IDS).logits, policy_logits(roles), atol=1e-5, rtol=1e-5)

    classifier = base(AutoModelForSequenceClassification, num_labels=1)
    loaded = PeftModel.from_pretrained(classifier, tmp_path / "run" / "critic")
    torch.testing.assert_close(classifier_values(loaded), values(roles), atol=1e-5, rtol=1e-5)
    assert values(roles).std() > 1e-3


@pytest.mark.parametrize("critic", ["shared", "adapter"])
@pytest.mark.parametrize("kind, tied", EVERY)
def test_lora_roles_load_with_ours_and_leave_requires_grad_alone(model, tmp_path, kind, tied, critic):
    base, changes = loader(model, tmp_path, tied), (TIED if tied else ADAPTERS)[kind]
    roles = ActorCritic(get_peft_model(base(), lora(**changes)), critic=critic)
    move(roles)
    saving.save_policy(roles, tmp_path / "run")
    saving.save_critic(roles, tmp_path / "run" / "critic")

    other = ActorCritic(get_peft_model(base(), lora(**changes)), critic=critic)
    before = {name: parameter.requires_grad for name, parameter in other.named_parameters()}
    reference = _reference(other)
    saving.load_policy(other, tmp_path / "run")
    saving.load_critic(other, tmp_path / "run" / "critic")
    assert {name: parameter.requires_grad for name, parameter in other.named_parameters()} == before
    assert torch.equal(policy_logits(other), policy_logits(roles))
    assert torch.equal(values(other), values(roles))
    assert torch.equal(_reference(other), reference)
    for name, parameter in roles.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


@torch.no_grad()
def _reference(roles: ActorCritic) -> torch.Tensor:
    with roles.switch.using(roles.adapters["reference"]):
        return roles.policy.get_base_model()(input_ids=IDS).logits


def test_an_adapter_with_its_own_name(base, tmp_path):
    """The policy's adapter lies in the folder itself, whatever its name, and the other adapters are not in it."""
    model = get_peft_model(base(), lora(), adapter_name="sft")
    model.add_adapter("other", lora(r=2))
    roles = ActorCritic(model, critic="adapter", model_adapter_name="sft", ref_adapter_name="other")
    move(roles)
    saving.save_policy(roles, tmp_path / "run")
    saving.save_critic(roles, tmp_path / "run" / "critic")
    names = saving.load_file(tmp_path / "run" / saving.ADAPTER_FILE)
    assert len(names) == 8 and not any(part in name for name in names for part in ("sft", "other", "critic"))
    plain = PeftModel.from_pretrained(base(), tmp_path / "run").eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=IDS).logits, policy_logits(roles))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_full_roles_load_with_plain_transformers_and_with_ours(kind, tied, tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    start = AutoModelForCausalLM.from_config(config).eval()
    roles = ActorCritic(copy.deepcopy(start))
    move(roles)
    saving.save_policy(roles, tmp_path)
    saving.save_critic(roles, tmp_path / "critic")

    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=IDS).logits
    torch.testing.assert_close(plain, policy_logits(roles), atol=1e-5, rtol=1e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert classifier.config.num_labels == 1
    torch.testing.assert_close(classifier_values(classifier), values(roles), atol=1e-5, rtol=1e-5)

    other = ActorCritic(copy.deepcopy(start))
    saving.load_policy(other, tmp_path)
    saving.load_critic(other, tmp_path / "critic")
    assert torch.equal(policy_logits(other), policy_logits(roles))
    assert torch.equal(values(other), values(roles))
    embeddings, head = other.policy.get_input_embeddings().weight, other.policy.get_output_embeddings().weight
    assert (embeddings is head) == tied


def test_a_kind_without_a_classifier_keeps_its_head(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    cohere = AutoConfig.for_model("cohere", **sizes, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0)
    roles = ActorCritic(AutoModelForCausalLM.from_config(cohere))
    move(roles)
    saving.save_critic(roles, tmp_path)
    expected = roles.value_head.weight.detach().clone()
    roles.value_head.weight.data.zero_()
    saving.load_critic(roles, tmp_path)
    assert torch.equal(roles.value_head.weight, expected)


def test_a_bf16_trunk_keeps_the_fp32_head(model, tmp_path):
    roles = ActorCritic(model.to(torch.bfloat16))
    move(roles)
    saving.save_policy(roles, tmp_path)
    saving.save_critic(roles, tmp_path / "critic")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    before = roles.value_head.weight.detach().clone()
    assert not torch.equal(before, before.bfloat16().float())
    roles.value_head.weight.data.zero_()
    saving.load_critic(roles, tmp_path / "critic")
    assert torch.equal(roles.value_head.weight, before)


def test_a_critic_model_of_its_own(model, classifier, tmp_path):
    roles = ActorCritic(model, value_model=copy.deepcopy(classifier))
    move(roles.value_model)
    saving.save_critic(roles, tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(classifier_values(plain), values(roles), atol=1e-5, rtol=1e-5)
    other = ActorCritic(model, value_model=classifier)
    saving.load_critic(other, tmp_path)
    assert torch.equal(values(other), values(roles))


@pytest.mark.parametrize("name", ["default", "mine", adapters.VALUE_ADAPTER])
def test_a_critic_model_with_an_adapter_of_any_name(model, classifier, tmp_path, name):
    classifier.save_pretrained(tmp_path / "base")

    def critic() -> PeftModel:
        fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        return get_peft_model(fresh, lora(task_type=TaskType.SEQ_CLS), adapter_name=name)

    roles = ActorCritic(model, value_model=critic())
    move(roles.value_model)
    saving.save_critic(roles, tmp_path / "critic")
    fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    plain = PeftModel.from_pretrained(fresh, tmp_path / "critic")
    torch.testing.assert_close(classifier_values(plain), values(roles), atol=1e-5, rtol=1e-5)
    other = ActorCritic(copy.deepcopy(model), value_model=critic())
    before = {key: parameter.requires_grad for key, parameter in other.named_parameters()}
    saving.load_critic(other, tmp_path / "critic")
    assert torch.equal(values(other), values(roles))
    assert {key: parameter.requires_grad for key, parameter in other.named_parameters()} == before


def test_folders_that_do_not_fit_are_one_line(base, model, tmp_path):
    roles = ActorCritic(get_peft_model(base(), lora()))
    saving.save_policy(roles, tmp_path / "run")
    for changes, line in (
        ({"target_modules": ["q_proj"]}, "unexpected '.*v_proj"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "'.*k_proj.*' is missing"),
        ({"modules_to_save": ["lm_head"]}, "'.*lm_head.weight' is missing"),
        ({"r": 8}, "size mismatch for .*lora_B"),
    ):
        other = ActorCritic(get_peft_model(base(), lora(**changes)))
        with pytest.raises(ValueError, match=f"adapter_model.safetensors does not fit the model: {line}") as error:
            saving.load_policy(other, tmp_path / "run")
        assert "\n" not in str(error.value)
    full = ActorCritic(model)
    saving.save_policy(full, tmp_path / "full")
    path = tmp_path / "full" / "model.safetensors"
    state = saving.load_file(path)
    for broken, line in (
        ({**state, "model.extra": torch.zeros(1)}, "does not fit the model: unexpected 'model.extra'"),
        ({name: t for name, t in state.items() if name != "model.norm.weight"}, "'model.norm.weight' is missing"),
        ({**state, "model.norm.weight": torch.zeros(3)}, "size mismatch for model.norm.weight"),
    ):
        saving.save_file(broken, path)
        with pytest.raises(ValueError, match=line):
            saving.load_policy(full, tmp_path / "full")


def test_weights_in_several_files(model, tmp_path):
    roles = ActorCritic(model)
    move(roles)
    expected = policy_logits(roles)
    roles.policy.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.no_grad():
        for parameter in roles.policy.parameters():
            parameter.zero_()
    saving.load_policy(roles, tmp_path)
    assert torch.equal(policy_logits(roles), expected)


def test_a_value_head_with_a_bias_comes_back(model, tmp_path):
    roles, other = ActorCritic(model), ActorCritic(copy.deepcopy(model))
    for part in (roles, other):
        part.add_value_bias()
    move(roles)
    saving.save_critic(roles, tmp_path)
    saving.load_critic(other, tmp_path)
    assert torch.equal(other.value_head.bias, roles.value_head.bias) and roles.value_head.bias != 0
    assert torch.equal(other.value_head.weight, roles.value_head.weight)


def test_a_value_head_without_the_bias_that_is_needed_is_one_line(model, tmp_path):
    saving.save_critic(ActorCritic(model), tmp_path)
    other = ActorCritic(copy.deepcopy(model))
    other.add_value_bias()
    with pytest.raises(ValueError, match=r"value_head.safetensors does not fit the model: 'score.bias' is missing"):
        saving.load_critic(other, tmp_path)
