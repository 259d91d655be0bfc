"""Our path to the logits against each model's own forward, and one scoring + training pass per model kind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from trl_alpharl.functional.logps import logps_and_entropy
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.backbone import FullPrecisionHead, check_head, decoder_of, hidden_states, take_positions

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
KINDS = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "phi3": {"partial_rotary_factor": 1.0},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny(kind: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, **KINDS[kind], **changes}))
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20)  # logits of some size: soft-capping and scaling must show
    return model.eval()


def batch() -> dict[str, torch.Tensor]:
    """Two rows, padded on the right, with the positions that predict their last three tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 64, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 6:], mask[1, 6:], mask[0, 7:] = 0, 0, 0
    predict_at = torch.tensor([[3, 4, 5], [2, 3, 4]])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.arange(8).expand(2, 8),
        "predict_at": predict_at,
        "completion_ids": ids.gather(1, predict_at + 1),
    }


def own_logits(model: nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model itself says at `predict_at`, one row at a time and without padding."""
    rows = []
    for row, mask in enumerate(tokens["attention_mask"].bool()):
        logits = model(input_ids=tokens["input_ids"][row : row + 1, mask], use_cache=False).logits[0].float()
        rows.append(logits[tokens["predict_at"][row]])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_head_equals_the_models_own_logits(kind):
    model, tokens = tiny(kind), batch()
    head = FullPrecisionHead(model)
    check_head(model, head)
    names = ("input_ids", "attention_mask", "position_ids")
    hidden = hidden_states(decoder_of(model), *(tokens[name] for name in names))
    ours = head(take_positions(hidden, tokens["predict_at"])).view(2, 3, 64)
    torch.testing.assert_close(ours, own_logits(model, tokens), atol=2e-5, rtol=1e-5)
    assert head.vocab_size == 64


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_scores_and_trains_with_ratio_1(kind):
    model, tokens = tiny(kind), batch()
    roles = ActorCritic(model).train()
    with torch.no_grad():
        scored = roles(**tokens, temperature=0.7)
        expected = logps_and_entropy(own_logits(model, tokens).flatten(0, 1) / 0.7, tokens["completion_ids"].flatten())
    torch.testing.assert_close(scored.per_token_logps.flatten(), expected[0], atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(scored.entropies.flatten(), expected[1], atol=5e-5, rtol=1e-5)
    trained = roles(**tokens, temperature=0.7)
    assert torch.equal(trained.per_token_logps.detach(), scored.per_token_logps)
    (trained.per_token_logps.sum() + trained.values.sum()).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    silent = [name for name, grad in grads.items() if grad is None or not grad.abs().sum() > 0]
    # An expert that no token was sent to has a zero gradient; the others must all learn.
    assert not [name for name in silent if "expert" not in name and "wpe" not in name], silent


@torch.no_grad()
def test_tied_embeddings_and_a_head_with_a_bias():
    tied = tiny("llama", tie_word_embeddings=True)
    assert FullPrecisionHead(tied).head.weight is tied.get_input_embeddings().weight
    check_head(tied, FullPrecisionHead(tied))

    model, tokens = tiny("llama"), batch()
    model.lm_head = nn.Linear(32, 64, bias=True)
    model.lm_head.bias[5] = 3.0
    head = FullPrecisionHead(model)
    hidden = hidden_states(model.model, tokens["input_ids"], tokens["attention_mask"], tokens["position_ids"])
    ours = head(take_positions(hidden, tokens["predict_at"])).view(2, 3, 64)
    torch.testing.assert_close(ours, own_logits(model, tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_head_runs_in_fp32_under_autocast_and_for_bf16_weights():
    model = tiny("llama").to(torch.bfloat16)
    hidden = torch.randn(5, 32, dtype=torch.bfloat16)
    exact = hidden.double() @ model.lm_head.weight.double().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = FullPrecisionHead(model)(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-5)


def test_logits_computed_in_an_unknown_way_are_refused():
    class Shifted(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + output.logits[..., :1] * 0.02
            return output

    model = tiny("llama")
    odd = Shifted(copy.deepcopy(model.config))
    odd.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="Shifted computes its logits in a way this package does not know"):
        ActorCritic(odd)
    with pytest.raises(ValueError, match="Shifted computes its logits"):  # a reference too
        ActorCritic(model, reference=odd)


def test_models_without_a_decoder_head_or_position_ids_are_refused():
    with pytest.raises(TypeError, match="expected a transformers model, found Linear"):
        decoder_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        FullPrecisionHead(tiny("llama").model)
    torch.manual_seed(0)
    bloom = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=4, bos_token_id=None)
    )
    with pytest.raises(ValueError, match="BloomForCausalLM takes no position_ids"):
        ActorCritic(bloom)


def test_a_reference_with_a_smaller_vocabulary_is_refused():
    with pytest.raises(ValueError, match="ref_model's vocabulary has 48 tokens, fewer than model's 64"):
        ActorCritic(tiny("llama"), reference=tiny("llama", vocab_size=48))
