"""Attention for short half-precision rows: what eager attention in float64 says, forward and backward."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from trl_alpharl.roles import cpu_attention
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.cpu_attention import LONGEST, NAME, short_rows_attention, use_cpu_attention

CPU = torch.device("cpu")
LEFT = (0, 3, 5)  # columns of padding before each row


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """(B, T, H, D) in float64, with autograd's own backward; each key head is copied for its query heads."""
    copies = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row of padding attends to nothing
    return torch.einsum("bhts,bhsd->bthd", weights, value)


def layer(groups: int = 1) -> nn.Module:
    """What sdpa's function asks of an attention layer."""
    module = nn.Module()
    module.num_key_value_groups = groups
    return module


def problem(groups=3, tokens=11, keys=None, size=16, values=None, dtype=torch.bfloat16):
    """Query, key and value of 3 rows with 2 key heads, as leaves."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2 * groups, tokens, size), (3, 2, keys or tokens, size), (3, 2, keys or tokens, values or size)]
    return [(1.5 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def causal(tokens: int, left=LEFT) -> Tensor:
    """(B, 1, T, T) bool: a token sees itself and those before it, not its row's padding on the left."""
    places = torch.arange(tokens)
    seen = places[:, None] >= places
    return torch.stack([seen & (places >= padding) for padding in left]).unsqueeze(1)


def additive(mask: Tensor, dtype=torch.bfloat16) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def run(function, inputs: list[Tensor], real: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients of a random mix of it; `real` (B, T): the tokens that count."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    if real is not None:
        output = output.masked_fill(~real[:, :, None, None], 0.0)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().double() - truth.detach()).norm() / truth.detach().norm())


MASKS = {
    "bool": lambda tokens: causal(tokens),
    "additive": lambda tokens: additive(causal(tokens)),
    "one for all rows": lambda tokens: causal(tokens, left=(0,)),
    "sliding window": lambda tokens: causal(tokens) & ~torch.ones(tokens, tokens).tril(-4).bool(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 3])
def test_as_near_to_float64_as_torchs_kernel_with_all_gradients(groups, mask):
    inputs, mask = problem(groups), MASKS[mask](11)
    real = torch.arange(11) >= torch.tensor(LEFT)[:, None]
    truth = run(lambda q, k, v: eager(q, k, v, mask, 0.2), [x.double() for x in inputs], real)
    ours, theirs = (
        run(lambda q, k, v, f=f: f(layer(groups), q, k, v, mask, scaling=0.2)[0], inputs, real)
        for f in (short_rows_attention, sdpa_attention_forward)
    )
    for name, found, other, expected in zip(("output", "query", "key", "value"), ours, theirs, truth):
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        assert distance(found, expected) < max(1.5 * distance(other, expected), 0.006), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [None, 24])
def test_the_formulas_are_exact(dtype, values):
    """The operation itself, in a precision that shows every term; values may be wider than keys."""
    inputs = problem(dtype=torch.float64, values=values)
    mask = causal(11, left=(0, 0, 0))
    truth = run(lambda q, k, v: eager(q, k, v, mask, 0.3), inputs)
    inputs = [x.to(dtype) for x in inputs]
    found = run(lambda q, k, v: cpu_attention._Attention.apply(q, k, v, mask, 0.3).transpose(1, 2), inputs)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other in zip(found, truth):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("masked", [True, False])
def test_decoding_one_token(masked):
    inputs = problem(tokens=1, keys=9)
    mask = (torch.arange(9) >= torch.tensor(LEFT)[:, None])[:, None, None] if masked else None
    truth = eager(*(x.double() for x in inputs), mask, 16**-0.5)
    with torch.no_grad():
        found = short_rows_attention(layer(3), *inputs, mask)[0]  # the usual scaling
    assert distance(found, truth) < 0.006


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_of_padding_is_finite_and_takes_nothing_from_the_others(dtype):
    """Its scores are all far below 0 here: a mask at the end of the range would take them past it."""
    shape = (1, 1, 6, 8)
    query, key = (torch.full(shape, fill, dtype=dtype).requires_grad_() for fill in (6.0, -6.0))
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    mask = causal(6, left=(2,))
    output = short_rows_attention(layer(), query, key, value, mask)[0]
    assert output.isfinite().all()
    expected = torch.stack([value[0, 0, 2 : place + 1].float().mean(0) for place in range(2, 6)])
    torch.testing.assert_close(output[0, 2:, 0].float(), expected, atol=0.01, rtol=0.01)
    output[:, 2:].sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))
    assert not value.grad[0, 0, :2].any() and value.grad[0, 0, 2:].all()


def test_probabilities_are_not_kept():
    saved = []
    inputs = problem(tokens=40, groups=4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        short_rows_attention(layer(4), *inputs, causal(40))
    assert saved and max(t.numel() for t in saved) < 3 * 8 * 40 * 40


# What goes to torch's kernel


CASES = {
    "ours": ({}, {}, False),
    "fp32": ({"dtype": torch.float32}, {}, True),
    "the longest": ({"tokens": LONGEST, "size": 2}, {}, False),
    "longer": ({"tokens": LONGEST + 1, "size": 2}, {}, True),
    "one token after many": ({"tokens": 1, "keys": LONGEST + 1, "size": 2}, {"attention_mask": None}, True),
    "one token after some": ({"tokens": 1, "keys": 9}, {"attention_mask": None}, False),
    "causal without a mask": ({}, {"attention_mask": None}, True),
    "dropout": ({}, {"dropout": 0.1}, True),
    "bias by position": ({}, {"position_bias": torch.zeros(1, 6, 11, 11, dtype=torch.bfloat16)}, True),
    "no dropout, no cap": ({}, {"dropout": 0.0, "softcap": None}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_does_not_do_is_passed_on_whole(monkeypatch, case):
    shapes, options, passed_on = CASES[case]
    inputs = problem(**shapes)
    options = {"attention_mask": causal(inputs[0].shape[2]), "scaling": 0.2, **options}
    calls = []

    def theirs(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(cpu_attention, "sdpa_attention_forward", theirs)
    torch.manual_seed(0)
    found = short_rows_attention(layer(3), *inputs, **options)[0]
    assert bool(calls) == passed_on
    if passed_on:
        assert calls[0]["scaling"] == 0.2 and calls[0].get("dropout") == options.get("dropout", 0.0)
        torch.manual_seed(0)
        assert torch.equal(found, sdpa_attention_forward(layer(3), *inputs, **options)[0])


def test_soft_capped_scores_are_not_left_uncapped():
    with pytest.raises(ValueError, match="softcap"):  # by torch's side, as it would without ours
        short_rows_attention(layer(3), *problem(), causal(11), softcap=5.0)


# In a model


def tiny(model, **changes):
    """A llama of 3 layers with 6 heads on 2 in bf16; rotary positions, weights large enough that attention matters."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    torch.manual_seed(0)
    deep = type(model)(LlamaConfig(**{**model.config.to_dict(), "head_dim": 16, **sizes, **changes}))
    with torch.no_grad():
        for block in deep.model.layers:
            block.self_attn.q_proj.weight.mul_(8)
            block.self_attn.k_proj.weight.mul_(8)
    return deep.bfloat16().eval()


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(14) >= torch.tensor(LEFT)[:, None]).long()
    ids = torch.randint(2, 64, (3, 14), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def answers(model, autocast=False) -> tuple[Tensor, Tensor]:
    """Logits of the real tokens, and the gradient of their squares by the embeddings."""
    tokens = rows()
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(**tokens).logits[tokens["attention_mask"].bool()]
    logits.double().square().sum().backward()
    return logits.detach().double(), model.get_input_embeddings().weight.grad.double()


@pytest.mark.parametrize("kind", ["weights", "autocast", "absolute positions, autocast"])
def test_a_models_logits_and_gradients_are_as_near_to_float64_as_with_sdpa(model, kind):
    if kind.startswith("absolute"):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_embd=96, n_layer=3, n_head=6, n_positions=32, initializer_range=0.1)
        theirs = GPT2LMHeadModel(config).bfloat16().eval()
    else:
        theirs = tiny(model)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    autocast = "autocast" in kind
    if autocast:
        theirs, ours = theirs.float(), ours.float()
    use_cpu_attention(ours)
    assert ours.config._attn_implementation == NAME and theirs.config._attn_implementation == "sdpa"
    truth, found, others = answers(exact), answers(ours, autocast), answers(theirs, autocast)
    for one, other, expected in zip(found, others, truth):
        assert 0 < distance(one, expected) < 1.5 * distance(other, expected)
    if kind != "autocast":  # there rotary positions make queries fp32, and torch's kernel it is
        assert not torch.equal(found[0], others[0])


def test_greedy_decoding_goes_on_as_the_whole_row_would(model):
    """Left padding, a first pass over the prompt, then one token at a time."""
    ours = tiny(model)
    use_cpu_attention(ours)
    tokens = {name: rows()[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found = ours.generate(**tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, output_logits=True,
                              return_dict_in_generate=True)  # fmt: skip
        for row, left in enumerate(LEFT):
            whole = ours(input_ids=found.sequences[row : row + 1, left:]).logits[0, 13 - left : -1]
            stepwise = torch.stack([step[row] for step in found.logits])
            torch.testing.assert_close(stepwise.float(), whole.float(), atol=0.03, rtol=0.03)


def test_the_roles_take_it_on_a_cpu_and_only_where_it_was_torchs(model, classifier):
    roles = ActorCritic(model, value_model=classifier)
    roles.fit_to_device(torch.device("meta"))
    assert model.config._attn_implementation == "sdpa"
    roles.fit_to_device(CPU)
    parts = (roles.policy, roles.reference, roles.value_model)
    assert [part.config._attn_implementation for part in parts] == [NAME] * 3
    eager_model = type(model)._from_config(model.config, attn_implementation="eager")
    use_cpu_attention(eager_model)
    assert eager_model.config._attn_implementation == "eager"


def test_a_model_that_caps_its_scores_stays_with_eager_attention():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(vocab_size=64, intermediate_size=32, head_dim=16, **sizes)
    capped = AutoModelForCausalLM.from_config(config)
    use_cpu_attention(capped)
    assert capped.config._attn_implementation == "eager"


def test_what_is_saved_does_not_name_it_and_loads_anywhere(model, tmp_path, monkeypatch):
    use_cpu_attention(model)
    ids = torch.tensor([[5, 6, 7]])
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path / "config")
    for file in (tmp_path / "config.json", tmp_path / "config/config.json", tmp_path / "generation_config.json"):
        assert NAME not in file.read_text()
    assert NAME not in json.dumps(model.config.to_dict(), default=str)
    for interface in (AttentionInterface, AttentionMaskInterface):  # a process in which this package was never imported
        monkeypatch.delitem(interface._global_mapping, NAME)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
