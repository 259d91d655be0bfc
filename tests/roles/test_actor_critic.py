"""The actor-critic: who answers for which role, where gradients go, and how much is stored."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn

from trl_alpharl.functional.logps import logps_and_entropy
from trl_alpharl.records import TokenChunk
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.adapters import adapter_parameters

IDS = torch.tensor([[5, 9, 11, 30, 7, 2, 40, 0], [8, 3, 60, 21, 9, 0, 0, 0]])
MASK = (IDS > 0).long()
PREDICT_AT = torch.tensor([[2, 3, 4, 5], [1, 2, 3, 4]])  # the last of the second row points at padding


def tokens() -> dict[str, torch.Tensor]:
    positions = torch.arange(8).expand(2, 8)
    return {
        "input_ids": IDS,
        "attention_mask": MASK,
        "position_ids": positions,
        "predict_at": PREDICT_AT,
        "completion_ids": IDS.gather(1, PREDICT_AT + 1),
    }


def chunk() -> TokenChunk:
    return TokenChunk(rows=[0, 1], completion_mask=torch.ones(2, 4, dtype=torch.bool), **tokens())


def adapted(model: nn.Module, **changes) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **changes))


def move(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def with_gradient(module: nn.Module) -> set[str]:
    return {
        name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().sum() > 0
    }


# What the roles say


@pytest.mark.parametrize("kind", ["full", "lora", "adapter", "model"])
def test_score_says_what_each_role_says_alone(model, classifier, kind):
    """Old log-probs, entropies, values and reference log-probs against the plain models, one row at a time."""
    start = copy.deepcopy(model).eval()
    policy = model if kind == "full" else adapted(model)
    roles = ActorCritic(
        policy,
        value_model=copy.deepcopy(classifier) if kind == "model" else None,
        critic="adapter" if kind == "adapter" else "shared",
    )
    move(roles)
    stats, reference = roles.score(chunk(), temperature=0.7)
    assert roles.switch.current == roles.adapters["policy"]

    def alone(model: nn.Module, adapter: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        with roles.switch.using(adapter), torch.no_grad():
            return logps_and_entropy(
                model(input_ids=IDS, attention_mask=MASK)
                .logits.gather(1, PREDICT_AT[..., None].expand(-1, -1, 64))
                .flatten(0, 1)
                / 0.7,
                tokens()["completion_ids"].flatten(),
            )

    inner = roles.policy if kind == "full" else roles.policy.get_base_model()
    logps, entropies = alone(inner, roles.adapters["policy"])
    torch.testing.assert_close(stats.per_token_logps.flatten(), logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.entropies.flatten(), entropies, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reference.flatten(), alone(start, None)[0], atol=1e-5, rtol=1e-5)
    assert (stats.per_token_logps - reference).abs().max() > 1e-3

    if kind == "model":
        trunk, head = roles.value_model.model, roles.value_model.score
    else:
        trunk, head = inner.model, roles.value_head
    with roles.switch.using(roles.adapters["critic"] or roles.adapters["policy"]), torch.no_grad():
        expected = head(trunk(input_ids=IDS, attention_mask=MASK).last_hidden_state).squeeze(-1).gather(1, PREDICT_AT)
    torch.testing.assert_close(stats.values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_values_start_at_0_and_the_reference_at_the_policy(model, kind):
    stats, reference = ActorCritic(model if kind == "full" else adapted(model)).score(chunk(), 1.0)
    assert not stats.values.any()
    assert torch.equal(stats.per_token_logps, reference)


def test_a_passed_reference_answers(model, classifier):
    other = move(copy.deepcopy(model))
    expected = ActorCritic(other).score(chunk(), 1.0)[0].per_token_logps
    for policy in (copy.deepcopy(model), adapted(copy.deepcopy(model))):
        roles = ActorCritic(policy, reference=other)
        assert torch.equal(roles.reference_logps(chunk(), 1.0), expected)
        assert not any(parameter.requires_grad for parameter in roles.reference.parameters())


# Where gradients go


@pytest.mark.parametrize("detach", [False, True])
def test_value_gradients_reach_the_shared_trunk_unless_detached(model, detach):
    roles = move(ActorCritic(adapted(model), critic_detach=detach))
    roles(**tokens()).values.sum().backward()
    reached = with_gradient(roles)
    assert "value_head.weight" in reached
    assert any("lora_B" in name for name in reached) != detach


def test_policy_gradients_do_not_reach_the_critics_adapter_and_the_other_way_round(model):
    roles = move(ActorCritic(adapted(model), critic="adapter"))
    roles(**tokens()).per_token_logps.sum().backward()
    assert with_gradient(roles) == {f"policy.{n[:-1]}" for n, _ in adapter_parameters(roles.policy, "default")}
    roles.zero_grad()
    roles(**tokens()).values.sum().backward()
    critic = {f"policy.{n[:-1]}" for n, _ in adapter_parameters(roles.policy, "critic")}
    assert with_gradient(roles) == critic | {"value_head.weight"}


@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_want_value_trains_the_critic_alone(model, critic):
    roles = move(ActorCritic(adapted(model), critic=critic))
    both = roles(**tokens())
    stats = roles(**tokens(), want="value")
    assert stats.per_token_logps is None and stats.entropies is None
    assert torch.equal(stats.values, both.values)
    stats.values.sum().backward()
    assert all(name == "value_head.weight" or ".critic." in name for name in with_gradient(roles))
    assert with_gradient(roles)


def test_want_policy_runs_no_critic(model, classifier):
    roles = ActorCritic(model, value_model=classifier)
    stats = roles(**tokens(), want="policy")
    assert stats.values is None and stats.per_token_logps.shape == (2, 4)


def test_case_18_a_critic_with_lora_of_its_own(model, classifier):
    critic = get_peft_model(classifier, LoraConfig(r=4, target_modules=["q_proj"], task_type=TaskType.SEQ_CLS))
    roles = move(ActorCritic(adapted(model), value_model=critic))
    roles(**tokens()).values.sum().backward()
    reached = with_gradient(roles)
    assert reached == {f"value_model.{name}" for name, p in critic.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in reached) and any("score" in name for name in reached)


@pytest.mark.parametrize("kind", ["full", "lora", "adapter"])
def test_case_29_a_bf16_trunk_has_an_fp32_head(model, kind):
    model = model.to(torch.bfloat16)
    roles = ActorCritic(
        model if kind == "full" else adapted(model), critic="adapter" if kind == "adapter" else "shared"
    )
    move(roles)
    stats = roles(**tokens())
    assert {stats.per_token_logps.dtype, stats.entropies.dtype, stats.values.dtype} == {torch.float32}
    assert roles.value_head.weight.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16
    (stats.per_token_logps.sum() + stats.values.sum()).backward()
    learning = {name for name, parameter in roles.named_parameters() if parameter.requires_grad}
    assert with_gradient(roles) == learning
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = roles(**tokens())
    assert under_autocast.values.dtype == torch.float32 and under_autocast.per_token_logps.dtype == torch.float32


# How much is stored


@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_case_2_all_roles_run_on_one_copy_of_the_base(model, critic):
    """Every linear layer that runs, in all roles, reads the weights that the policy came with."""
    base = {p.data_ptr(): name for name, p in model.named_parameters()}
    roles = ActorCritic(adapted(model), critic=critic)
    seen: set[int] = set()

    def note(module, args):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            seen.add(module.weight.data_ptr())

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    roles.score(chunk(), 1.0)
    hook.remove()
    new = {p.data_ptr() for n, p in roles.named_parameters() if ".lora_" in n} | {roles.value_head.weight.data_ptr()}
    assert seen - set(base) <= new
    assert roles.reference is None
    total = sum(p.numel() for p in roles.parameters())
    assert total == sum(p.numel() for p in model.parameters() if p.data_ptr() in base) + sum(
        p.numel() for n, p in roles.named_parameters() if ".lora_" in n or n == "value_head.weight"
    )


# What transformers' Trainer sees


def test_the_face_of_the_policy(model):
    roles = ActorCritic(adapted(model), critic="adapter")
    inner = roles.policy.get_base_model()
    assert roles.config is inner.config and roles.generation_config is inner.generation_config
    assert roles.dtype == torch.float32 and roles.device.type == "cpu"
    assert not roles.model_tags
    roles.add_model_tags(["ppo"])
    assert "ppo" in roles.model_tags and "ppo" in inner.model_tags


def test_generate_speaks_as_the_policy_in_any_role(model):
    roles = move(ActorCritic(adapted(model), critic="adapter"))
    ids = {"input_ids": IDS[:1, :6], "max_new_tokens": 5, "do_sample": False}
    roles.switch.use("default")
    expected = roles.policy.get_base_model().generate(**ids)
    for role in (None, "critic"):
        roles.switch.use(role)
        assert torch.equal(roles.generate(**ids), expected)
        assert roles.switch.current == role
    roles.switch.use(None)
    assert not torch.equal(roles.policy.get_base_model().generate(**ids), expected)


def test_checkpointing_that_cannot_know_the_roles_is_refused(model):
    roles = ActorCritic(adapted(model))
    with pytest.raises(ValueError, match="use_reentrant: true is not supported"):
        roles.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="context_fn"):
        roles.gradient_checkpointing_enable({"context_fn": lambda: None})


@pytest.mark.parametrize("older", [False, True])
def test_checkpointing_reaches_policy_and_critic_and_goes_off_again(model, classifier, older):
    roles = ActorCritic(adapted(model), value_model=classifier)
    name = "gradient_checkpointing" if older else "activation_checkpointing"
    models = (model, classifier)
    getattr(roles, f"{name}_enable")()
    assert all(inner.is_activation_checkpointing for inner in models)
    getattr(roles, f"{name}_disable")()
    assert not any(inner.is_activation_checkpointing for inner in models)


@pytest.mark.parametrize("role", ["model", "ref_model"])
def test_a_nan_weight_is_named_before_anything_runs(trainer, model, role):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(FloatingPointError, match=f"{role}: parameter 'model.layers.1.mlp.up_proj.weight'"):
        trainer(**{role: broken})


def test_critic_detach_goes_with_a_shared_critic(trainer, lora, classifier):
    with pytest.raises(ValueError, match="critic_detach"):
        trainer(critic_detach=True, critic="adapter", peft_config=lora)
    with pytest.raises(ValueError, match="critic_detach"):
        trainer(critic_detach=True, value_model=classifier)
