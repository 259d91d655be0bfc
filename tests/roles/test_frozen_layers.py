"""Frozen lower layers run once: passes that start from what they gave are the whole passes, bit for bit, or are not
offered."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from trl_alpharl.records import TokenChunk
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.backbone import decoder_of, hidden_states
from trl_alpharl.roles.frozen_layers import frozen_layers

LAYERS = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
OLD = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Config class and what it needs beyond SIZES; whether the frozen layers can run on their own.
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}, True),
    "gpt2": ("GPT2Config", OLD, True),
    "gemma2, windows of 4": ("Gemma2Config", {"sliding_window": 4, "query_pre_attn_scalar": 8}, True),
    "gemma3, windows of 4": ("Gemma3TextConfig", {"sliding_window": 4, "query_pre_attn_scalar": 8}, True),
    "mistral, windows of 4": ("MistralConfig", {"sliding_window": 4}, True),
    "qwen3": ("Qwen3Config", {}, True),
    "neox": ("GPTNeoXConfig", {}, True),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, True),
    "qwen3 of experts": ("Qwen3MoeConfig", {"num_experts": 4, **EXPERTS}, True),
    "bloom, layers that return tuples": ("BloomConfig", {"n_layer": LAYERS, "n_head": 4}, False),
    "gemma3n, upper layers that read keys of lower ones": (
        "Gemma3nTextConfig",
        {
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": None,
        },
        False,
    ),
}


def tiny(architecture: str) -> nn.Module:
    name, changes, _ = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that every layer matters
            parameter.mul_(3.0)
    return model


def layers_of(model: nn.Module) -> nn.ModuleList:
    decoder = decoder_of(model)
    return decoder.h if hasattr(decoder, "h") else decoder.layers


def freeze_below(model: nn.Module, count: int) -> nn.Module:
    """Only the layers from `count` on, the final norm and the head learn."""
    above = {id(p) for layer in list(layers_of(model))[count:] for p in layer.parameters()}
    for name, parameter in decoder_of(model).named_parameters():
        parameter.requires_grad_(id(parameter) in above or name.startswith(("norm.", "ln_f.", "final_layer_norm.")))
    return model


def tokens(width: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows, padded on the right."""
    ids = torch.randint(2, 64, (3, width), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(width) < torch.tensor([width - 1, 9, 3])[:, None]).long()
    return ids * mask, mask, torch.arange(width).expand(3, width)


def calls_of(modules) -> list[int]:
    """A list that gets the place of every module that runs."""
    seen: list[int] = []
    for place, module in enumerate(modules):
        module.register_forward_pre_hook(lambda *_, place=place: seen.append(place))
    return seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_parts_are_the_whole_or_are_refused(architecture):
    model = freeze_below(tiny(architecture), 2)
    found = frozen_layers(model)
    assert (found is not None) == ARCHITECTURES[architecture][2]
    if found is None:
        return
    assert found.count == 2
    ran = calls_of(layers_of(model))
    with torch.no_grad():
        whole = hidden_states(decoder_of(model), *tokens())
        assert ran == [0, 1, 2, 3]
        ran.clear()
        hidden = found.run(*tokens())
        assert ran == [0, 1] and hidden.shape == whole.shape
        ran.clear()
        with found.replaced_by(hidden):
            rest = hidden_states(decoder_of(model), *tokens())
        assert ran == [2, 3] and torch.equal(rest, whole)
        with found.replaced_by(hidden + 0.1 * hidden.flip(-1)):  # it is what the upper layers read
            assert not torch.allclose(hidden_states(decoder_of(model), *tokens()), whole, atol=1e-3)


class ReadsAllLayers(LlamaModel):
    """A decoder that returns the mean of what its layers give."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden, position_ids)
        every = []
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions)
            every.append(hidden)
        return (torch.stack(every).mean(0),)


class ReadsTheLowest(LlamaModel):
    """A decoder that looks inside a lower layer."""

    def forward(self, **kwargs):
        return (super().forward(**kwargs)[0] + self.layers[0].self_attn.q_proj.weight.sum(),)


@pytest.mark.parametrize("decoder, offered", [(ReadsAllLayers, False), (ReadsTheLowest, True)])
def test_a_decoder_with_other_ways_through_it(decoder, offered):
    model = tiny("llama")
    model.model = decoder(model.config).eval()
    found = frozen_layers(freeze_below(model, 2))
    assert (found is not None) == offered
    if offered:
        with torch.no_grad(), found.replaced_by(found.run(*tokens())):
            part = hidden_states(model.model, *tokens())
        assert torch.equal(part, hidden_states(model.model, *tokens()))


# Which layers are frozen


def adapted(model: nn.Module, **changes) -> nn.Module:
    values = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [2, 3]}
    return get_peft_model(model, LoraConfig(**{**values, **changes}))


def count(model: nn.Module) -> int | None:
    found = frozen_layers(model)
    return None if found is None else found.count


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, 2),
        ({"layers_to_transform": [3]}, 3),
        ({"layers_to_transform": [1, 3]}, 1),
        ({"layers_to_transform": None}, None),
        ({"layers_to_transform": [0, 3]}, None),
        ({"target_modules": ["down_proj"], "layers_to_transform": [2]}, 2),
        ({"modules_to_save": ["lm_head"]}, 2),
        ({"modules_to_save": ["embed_tokens"]}, None),
        ({"modules_to_save": ["layers.0.mlp"]}, None),
        ({"trainable_token_indices": [5]}, None),
        ({"target_modules": ["lm_head"], "layers_to_transform": None}, 3),
        ({"target_modules": ["embed_tokens"], "layers_to_transform": None}, None),
    ],
    ids=str,
)
def test_layers_below_the_lowest_adapter(changes, expected):
    assert count(adapted(tiny("llama"), **changes)) == expected


@pytest.mark.parametrize("changes", [{"layers_to_transform": [1]}, {"modules_to_save": ["layers.1.mlp"]}], ids=str)
def test_an_adapter_that_is_not_the_policys_counts_too(changes):
    model = adapted(tiny("llama"))
    model.add_adapter(
        "other", LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [3], **changes})
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)  # as a reference is frozen
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".other." in name)
    assert count(model) == 1


def test_full_parameters():
    model = tiny("llama")
    assert count(model) is None  # everything learns
    freeze_below(model, 2)
    assert count(model) == 2
    model.model.embed_tokens.requires_grad_(True)
    assert count(model) is None
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].input_layernorm.weight.requires_grad_(True)
    assert count(model) == 1
    assert count(tiny("llama").requires_grad_(False)) == LAYERS - 1  # at the least, one layer reads what was kept


def test_weights_without_numbers_are_not_asked():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert frozen_layers(freeze_below(model, 2)) is None


# The decoder comes back


class Error(Exception):
    pass


def broken(*args):
    raise Error


@pytest.mark.parametrize("place", [0, 1, 2, "replaced"])
def test_the_decoder_is_whole_again_after_an_error(place):
    model = freeze_below(tiny("llama"), 2)
    found, decoder = frozen_layers(model), decoder_of(model)
    layers, own = decoder.layers, list(decoder.layers)
    expected = hidden_states(decoder, *tokens()).detach()
    hidden = found.run(*tokens())
    assert decoder.layers is layers
    hook = own[3 if place == "replaced" else place].register_forward_pre_hook(broken)
    if place == 2:  # above what runs
        found.run(*tokens())
    elif place == "replaced":
        with pytest.raises(Error), found.replaced_by(hidden):
            hidden_states(decoder, *tokens())
    else:
        with pytest.raises(Error):
            found.run(*tokens())
    hook.remove()
    assert decoder.layers is layers and list(decoder.layers) == own
    assert list(decoder._modules) == list(type(decoder)(decoder.config)._modules)  # in the order of the state dict
    assert torch.equal(hidden_states(decoder, *tokens()), expected)


@pytest.mark.parametrize("training", [True, False])
def test_looking_for_them_changes_nothing(training):
    model = freeze_below(tiny("llama"), 2).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learning = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    frozen_layers(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.requires_grad for p in model.parameters()] == learning
    assert model.training == training and all(module.training == training for module in model.modules())
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# All roles


PREDICT_AT = torch.tensor([[3, 4, 5], [2, 3, 4], [0, 1, 2]])


def chunk() -> TokenChunk:
    ids, mask, positions = tokens()
    completion_mask = mask.bool().gather(1, PREDICT_AT + 1)
    return TokenChunk([0, 1, 2], ids, mask, positions, PREDICT_AT, ids.gather(1, PREDICT_AT + 1), completion_mask)


def moved(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


KINDS = {
    "adapter": (True, {}),
    "critic's adapter": (True, {"critic": "adapter"}),
    "full parameters": (False, {}),
}


def roles_of(kind: str, cached: bool | None) -> ActorCritic:
    is_adapted, options = KINDS[kind]
    model = adapted(tiny("llama")) if is_adapted else freeze_below(tiny("llama"), 2)
    torch.manual_seed(5)
    return moved(ActorCritic(model, cache_frozen_layers=cached, **options))


def trained(roles: ActorCritic, frozen: Tensor | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs, entropies, values, and their gradients; another role is active when the backward runs."""
    roles.zero_grad()
    names = ("input_ids", "attention_mask", "position_ids", "predict_at", "completion_ids")
    stats = roles.train()(**{name: getattr(chunk(), name) for name in names}, frozen_hidden=frozen)
    with roles.switch.using(roles.adapters["reference"]):
        sum(part.square().sum() for part in stats).backward()
    return [part.detach() for part in stats], {
        n: p.grad.clone() for n, p in roles.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_gradients_are_those_of_the_whole_pass(kind, checkpointing):
    plain, cached = roles_of(kind, False), roles_of(kind, None)
    if checkpointing:
        for roles in (plain, cached):
            roles.activation_checkpointing_enable()
    assert plain.frozen_hidden(chunk()) is None
    frozen = cached.train().frozen_hidden(chunk())
    ran = calls_of(layer.mlp for layer in layers_of(cached.policy))  # inside: a recompute passes by a layer's own hooks
    (stats, gradients), (expected, expected_gradients) = trained(cached, frozen), trained(plain, None)
    assert not {0, 1} & set(ran)
    assert ran.count(2) == (1 + checkpointing) * (1 + (kind == "critic's adapter"))
    for one, other in zip(stats, expected):
        assert torch.equal(one, other)
    assert gradients.keys() == expected_gradients.keys() and len(gradients) > 5
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
        assert gradient.abs().max() > 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_role_starts_from_what_was_kept(kind):
    """The copy that is a full-parameter policy's reference included; scores are the same bits."""
    plain, cached = roles_of(kind, False), roles_of(kind, True)
    frozen = cached.frozen_hidden(chunk())
    with_frozen = TokenChunk(**{**vars(chunk()), "frozen_hidden": frozen})
    models = [cached.policy] if cached.reference is None else [cached.policy, cached.reference]
    ran = [calls_of(layers_of(model)) for model in models]
    (stats, reference), (expected, expected_reference) = (
        roles.score(asked, 0.7) for roles, asked in ((cached, with_frozen), (plain, chunk()))
    )
    assert all(seen and not {0, 1} & set(seen) for seen in ran)
    for one, other in zip([*stats, reference], [*expected, expected_reference]):
        assert torch.equal(one, other)
    assert not torch.equal(stats.per_token_logps, reference)  # the policy has moved


def test_a_reference_or_critic_with_weights_of_its_own_runs_whole(classifier):
    reference = moved(tiny("llama"))
    value_config = copy.deepcopy(classifier.config)
    value_model = type(classifier)(value_config)
    torch.manual_seed(5)
    roles = ActorCritic(freeze_below(tiny("llama"), 2), reference=reference, value_model=value_model)
    expected = roles.score(chunk(), 1.0)
    ran = [calls_of(layers_of(model)) for model in (roles.policy, reference, value_model)]
    found = roles.score(TokenChunk(**{**vars(chunk()), "frozen_hidden": roles.frozen_hidden(chunk())}), 1.0)
    assert ran == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]  # the policy's lower layers once, the others from the bottom
    for one, other in zip([*found[0], found[1]], [*expected[0], expected[1]]):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "model", [tiny("llama"), adapted(tiny("llama"), layers_to_transform=None)], ids=["full", "lora"]
)
def test_asked_for_in_vain_is_one_line(model):
    with pytest.raises(ValueError) as error:
        ActorCritic(model, cache_frozen_layers=True)
    message = str(error.value)
    assert message.startswith("cache_frozen_layers: ") and "lora_top_layers" in message and "\n" not in message


def test_a_layer_that_is_unfrozen_later_is_told():
    """It would silently get no gradient."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    policy = LlamaForCausalLM(config).requires_grad_(False)
    policy.model.layers[1].requires_grad_(True)
    found = frozen_layers(policy)
    policy.model.layers[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="cache_frozen_layers"), found.replaced_by(torch.zeros(1, 2, 8)):
        pass
