import dataclasses
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from trl_alpharl.functional.subspace import SUBSPACE_METHODS
from trl_alpharl.knobs import LowRankKnobs, Storage, SubspaceMethod
from trl_alpharl.lowrank.callback import LowRankGradientCallback
from trl_alpharl.lowrank.config import _OPTIMIZER_ONLY, PRESETS, LowRankConfig
from trl_alpharl.lowrank.optimizer import LowRankAdamW
from trl_alpharl.shapes import STORAGE


def test_the_choices_of_the_knobs_are_the_entries_of_the_tables():
    assert set(get_args(SubspaceMethod)) == set(SUBSPACE_METHODS)
    assert set(get_args(Storage)) == set(STORAGE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, r"^rank is 0; it must be at least 1"),
        ({"rank": 3.5}, r"^rank is 3.5; it must be a whole number"),
        ({"rank": True}, r"^rank is True; it must be a whole number"),
        ({"rank_policy": "bogus"}, r"^rank_policy is 'bogus'; it must be one of 'fixed', 'tanh', 'energy', 'sqrt'"),
        ({"refresh": "svds"}, r"^refresh is 'svds'; it must be one of"),
        ({"rotate_moments": 1}, r"^rotate_moments is 1; it must be true or false"),
        ({"energy": 1.5}, r"^energy is 1.5; it must be above 0 and at most 1"),
        ({"update_gap": -1}, r"^update_gap is -1; it must be 0 or more"),
        ({"rank_pattern": "papers"}, r"^rank_pattern is 'papers'; it must be a preset \(paper, energy\)"),
        ({"rank_pattern": {"(": 3}}, r"^rank_pattern: '\(' is no regular expression"),
        ({"rank_pattern": {"mlp": "3"}}, r"^rank_pattern: 'mlp' has rank '3'; it must be a whole number"),
        ({"rank_pattern": "paper", "rank_policy": "tanh"}, r"rank_pattern gives fixed ranks and rank_policy is 'tanh'"),
        ({"rank_min": 64, "rank_max": 32}, r"rank_min is 64, above rank_max, 32"),
        ({"update": "scaled", "accumulate_in_subspace": True}, r"which update: scaled needs"),
        ({"update": "scaled", "all_reduce": "projected"}, r"which update: scaled needs"),
        ({"all_reduce": "projected", "accumulate_in_subspace": False}, r"^all_reduce: projected exchanges"),
        ({"tanh_tau": 9.0}, r"^tanh_tau is set, but rank_policy is 'fixed'; tanh_tau is read with 'tanh'"),
        ({"rank_max": 64, "rank_policy": "tanh"}, r"^rank_max is set, but rank_policy is 'tanh'"),
        ({"all_reduce_rank": 4}, r"^all_reduce_rank is set, but all_reduce is 'full'"),
    ],
)
def test_refuses_what_cannot_work_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        LowRankConfig(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("preset", "ffn", "output", "query", "embedding"), [("paper", 128, 64, 64, 32), ("energy", 128, 64, 32, 64)]
)
def test_presets_know_the_names_of_common_models(preset, ffn, output, query, embedding):
    config = LowRankConfig(rank_pattern=preset)
    ranks = {
        ffn: ["model.layers.0.mlp.gate_proj.weight", "transformer.h.0.mlp.c_proj.weight", "gpt_neox.layers.1.mlp.x"],
        output: ["model.layers.0.self_attn.o_proj.weight", "transformer.h.3.attn.c_proj.weight"],
        query: ["policy.model.layers.0.self_attn.q_proj.weight", "transformer.h.3.attn.c_attn.weight"],
        embedding: ["model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight"],
    }
    for names in ([ffn], [output], [query], [embedding]):
        for rank in names:
            assert all(config.start_rank(name, None) == rank for name in ranks[rank])
    assert config.start_rank("something.else.weight", None) == config.rank


def test_rank_policies():
    assert LowRankConfig(rank_policy="sqrt", rank=64).start_rank("x", 576 * 30) == 24
    assert LowRankConfig(rank_policy="sqrt", rank=64).start_rank("x", 8192 * 80) == 64
    with pytest.raises(ValueError, match=r"^rank_policy sqrt: the model's config has no hidden_size"):
        LowRankConfig(rank_policy="sqrt").start_rank("x", None)
    tanh = LowRankConfig(rank_policy="tanh")
    assert (tanh.start_rank("x", None), tanh.scheduled_rank(32, 10**6)) == (32, 96)
    assert LowRankConfig(rank=7).scheduled_rank(9, 10**6) == 9


def test_prefixed_fields_give_the_same_config():
    hints = get_type_hints(LowRankKnobs)
    values = {f.name: f.default for f in dataclasses.fields(LowRankKnobs)}
    changed = {**values, "rank": 8, "side": "long", "rank_pattern": {"mlp": 4}}
    assert LowRankConfig.of(SimpleNamespace(**{f"lowrank_{k}": v for k, v in changed.items()})) == LowRankConfig(
        **changed
    )
    assert hints.keys() == values.keys()
    with pytest.raises(ValueError, match=r"^lowrank_rank is 0; it must be at least 1"):
        LowRankConfig.of(SimpleNamespace(**{f"lowrank_{k}": v for k, v in {**values, "rank": 0}.items()}))


@pytest.mark.parametrize("name", ["update", "moment_storage", "update_gap", "all_reduce"])
def test_the_callback_refuses_fields_that_it_would_not_read(name):
    other = {"update": "scaled", "moment_storage": "fp32", "update_gap": 10, "all_reduce": "powersgd"}[name]
    with pytest.raises(ValueError, match=f"^{name} is {other!r}, which only the low-rank optimizer reads"):
        LowRankConfig(**{name: other}).check_for_callback()
    LowRankConfig(rank=4, refresh="svd", rank_policy="energy").check_for_callback()


# Every field does something: another value gives another run. The second dict is what the field needs to matter.
OTHER = {
    "rank": (4, {}),
    "rank_policy": ("tanh", {}),
    "rank_pattern": ({"weight": 4}, {}),
    "tanh_base": (4, {"rank_policy": "tanh"}),
    "tanh_delta": (2, {"rank_policy": "tanh", "tanh_base": 8, "tanh_tau": 2.0}),
    "tanh_tau": (9.0, {"rank_policy": "tanh", "tanh_base": 8, "tanh_tau": 2.0, "tanh_delta": 30}),
    "energy": (0.2, {"rank_policy": "energy", "update_gap": 1}),
    "rank_min": (32, {"rank_policy": "energy", "energy": 0.2, "update_gap": 1}),
    "rank_max": (9, {"rank_policy": "energy", "energy": 1.0, "update_gap": 1}),
    "side": ("out", {}),
    "refresh": ("svd", {}),
    "update_gap": (2, {}),
    "rotate_moments": (False, {}),
    "update": ("scaled", {}),
    "scale": (0.5, {}),
    "accumulate_in_subspace": (False, {}),
    "norm_sketch": (9, {}),
    "small_lora": (True, {}),
    "basis_storage": ("nf4", {}),
    "moment_storage": ("int8", {}),
    "accumulator_storage": ("bf16", {}),
    "plain_storage": ("8bit", {}),
    "stochastic_rounding": (False, {}),
    "seed": (1, {}),
}
ELSEWHERE = {"all_reduce", "all_reduce_rank"}  # two processes: test_distributed.py


class Little(nn.Module):
    """bf16; one matrix to project, one that is a small LoRA factor by its name, one too small to project."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(96, 400, bias=False)
        self.lora_A = nn.Linear(400, 60, bias=False)
        self.head = nn.Linear(60, 5000, bias=False)
        self.bfloat16()

    def forward(self, x):
        return self.head(self.lora_A(torch.tanh(self.matrix(x))))


def digest(config: LowRankConfig) -> list:
    """What a few steps of two micro-batches leave: weights, bytes, norms, what is in p.grad."""
    from trl_alpharl.lowrank.param_groups import low_rank_groups

    model = Little()
    pattern = {"rank_pattern": {**(config.rank_pattern or {}), "head": 0}} if config.rank_policy == "fixed" else {}
    config = dataclasses.replace(config, **pattern)
    optimizer = LowRankAdamW(low_rank_groups(model, config), lr=1e-2, config=config, max_grad_norm=1.0)
    left: list = []
    for step in range(5):
        for part in range(2):
            x = torch.randn(6, 96, generator=torch.Generator().manual_seed(2 * step + part)).bfloat16()
            model(x).float().square().mean().backward()
        left += [model.matrix.weight.grad is None, optimizer.gradient_bytes()]
        optimizer.step()
        left.append(float(optimizer.last_norm))
        optimizer.zero_grad()
    left += [optimizer.state_bytes(), *(float(p.detach().double().sum()) for p in model.parameters())]
    return left


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(LowRankKnobs) if f.name not in ELSEWHERE])
def test_every_field_changes_something(name):
    value, needs = OTHER[name]
    base = {"rank": 48, "update_gap": 3, **needs}
    assert digest(LowRankConfig(**base)) != digest(LowRankConfig(**{**base, name: value}))


READ_BY_THE_CALLBACK = [name for name in OTHER if name not in _OPTIMIZER_ONLY]


@pytest.mark.parametrize("name", READ_BY_THE_CALLBACK)
def test_every_field_that_the_callback_takes_changes_its_gradients(name):
    def digest(config):
        model, callback = Little(), LowRankGradientCallback(config)
        args = SimpleNamespace(fp16=False, deepspeed=None, fsdp=None)
        callback.on_train_begin(args, None, None, model=model)
        sums = []
        for step in range(4):
            model.zero_grad()
            model(
                torch.randn(60, 96, generator=torch.Generator().manual_seed(step)).bfloat16()
            ).float().square().mean().backward()
            callback.on_pre_optimizer_step(args, SimpleNamespace(global_step=step), None)
            sums += [float(p.grad.double().abs().sum()) for p in model.parameters()]
        return sums

    value, needs = OTHER[name]
    base = {"rank": 24, **{key: other for key, other in needs.items() if key not in _OPTIMIZER_ONLY}}
    assert digest(LowRankConfig(**base)) != digest(LowRankConfig(**{**base, name: value}))


def test_presets_are_ordered_from_special_to_general():
    first, second = list(PRESETS["energy"].items())[1:3]
    assert first[1] == 64 and second[1] == 32
