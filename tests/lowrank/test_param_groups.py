import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from trl_alpharl.lowrank.callback import LowRankGradientCallback
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.optimizer import LowRankAdamW
from trl_alpharl.lowrank.param_groups import describe, low_rank_groups, low_rank_optimizer, plan


def reasons(model, config):
    return {item.name: (item.rank, item.reason) for item in plan(model, config)}


def test_one_line_says_what_is_projected_and_why_the_rest_is_not(model, caplog):
    """Case 37: with the counts."""
    with caplog.at_level(logging.WARNING):
        low_rank_groups(model, LowRankConfig(rank=8, rank_pattern={"lm_head": 0, "embed": 4}))
    (line,) = caplog.messages
    assert line == (
        "low-rank gradients, side in: 15 matrices (0.1M parameters) at rank 4, 8. "
        "Not projected: 5 that are no matrices; 1 with rank 0 in rank_pattern."
    )


def test_every_trainable_parameter_is_in_one_group_and_decay_follows_the_names(model):
    named = dict(model.named_parameters())
    named["model.norm.weight"].requires_grad_(False)
    decayed = {"model.layers.0.mlp.up_proj.weight"}
    groups = low_rank_groups(model, LowRankConfig(rank=8), weight_decay=0.1, decayed=decayed)
    found = [p for group in groups for p in group["params"]]
    assert {id(p) for p in found} == {id(p) for p in named.values() if p.requires_grad} and len(found) == len(named) - 1
    (decaying,) = [group for group in groups if group["weight_decay"]]
    assert [id(p) for p in decaying["params"]] == [id(named["model.layers.0.mlp.up_proj.weight"])]


def test_gpt2_s_transposed_layers_are_projected_on_their_input_too():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=64, n_layer=1, n_head=2, n_positions=32))
    dims = {item.name: item.in_dim for item in plan(model, LowRankConfig(rank=4))}
    assert dims["transformer.h.0.mlp.c_fc.weight"] == 0 and dims["transformer.wte.weight"] == 1
    optimizer = LowRankAdamW(low_rank_groups(model, LowRankConfig(rank=4)))
    weight = model.transformer.h[0].mlp.c_fc.weight  # (64, 256): 64 inputs
    assert optimizer._matrices[weight].d == 64
    model(torch.randint(0, 90, (2, 8)), labels=torch.randint(0, 90, (2, 8))).loss.backward()
    optimizer.step()
    assert optimizer.state[weight]["d"] == 64


@pytest.mark.parametrize(
    ("r", "rank", "small_lora", "projected", "reason"),
    [
        (4, 128, False, 0, "saves nothing there"),  # case 36
        (4, 128, True, 0, "saves nothing there"),
        (16, 4, False, 0, "low-rank moments lose there"),
        (16, 4, True, 4, ""),
        (80, 16, False, 4, ""),
    ],
)
def test_lora_factors_are_projected_from_rank_65_on(model, caplog, r, rank, small_lora, projected, reason):
    lora = get_peft_model(model, LoraConfig(r=r, target_modules=["up_proj"]))
    config = LowRankConfig(rank=rank, small_lora=small_lora, side="long")
    with caplog.at_level(logging.WARNING):
        groups = low_rank_groups(lora, config)
    optimizer = LowRankAdamW(groups, config=config)
    assert len(optimizer._matrices) == projected
    assert reason in caplog.messages[0]
    lora(torch.randint(0, 64, (2, 6)), labels=torch.randint(0, 64, (2, 6))).loss.backward()
    optimizer.step()  # plain Adam for those matrices


def test_one_flag_keeps_the_moments_of_small_lora_in_8_bit(model):
    lora = get_peft_model(model, LoraConfig(r=64, target_modules=["up_proj"]))
    sizes = {}
    for kind in ("fp32", "8bit"):
        config = LowRankConfig(plain_storage=kind)
        optimizer = LowRankAdamW(low_rank_groups(lora, config), config=config)
        lora(torch.randint(0, 64, (2, 6)), labels=torch.randint(0, 64, (2, 6))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert {state["mean_kind"] for state in optimizer.state.values()} == {kind} and not optimizer._matrices
        sizes[kind] = optimizer.state_bytes()
    assert sizes["fp32"] / sizes["8bit"] > 3.9


def test_frozen_and_0d_and_flattened_parameters(model):
    model.scale = nn.Parameter(torch.tensor(1.0))
    found = reasons(model, LowRankConfig(rank=8))
    assert found["scale"] == (0, "vectors")
    model.flat = type("FlatParameter", (nn.Parameter,), {})(torch.zeros(4096))
    with pytest.raises(ValueError, match=r"^low-rank gradients: flat is sharded by FSDP"):
        plan(model, LowRankConfig(rank=8))


def test_tied_weights_are_planned_once(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    names = list(reasons(model, LowRankConfig(rank=8)))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_the_pattern_s_first_match_wins_and_bare_parameters_cannot_have_one(model):
    config = LowRankConfig(rank_pattern={"layers.0.*mlp": 4, "mlp": 8}, rank=16)
    found = reasons(model, config)
    assert found["model.layers.0.mlp.up_proj.weight"][0] == 4
    assert found["model.layers.1.mlp.up_proj.weight"][0] == 8
    assert found["model.layers.1.self_attn.q_proj.weight"][0] == 16
    with pytest.raises(ValueError, match="rank_pattern goes by names"):
        LowRankAdamW(model.parameters(), config=config)


def test_the_sqrt_rule_reads_the_model_s_size(model):
    assert {item.rank for item in plan(model, LowRankConfig(rank_policy="sqrt"))} == {0, 8}  # 0.15 sqrt(64 * 2) < 8


def test_arguments_under_which_it_would_train_wrong(model, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_grad_norm=0.5)
    cls, kwargs = low_rank_optimizer(model, args, LowRankConfig(rank=8))
    assert cls is LowRankAdamW and kwargs["max_grad_norm"] == 0.5 and kwargs["lr"] == args.learning_rate
    for name, reason in (("fp16", "fp16: its GradScaler"), ("deepspeed", "deepspeed: it steps inside backward")):
        bad = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        setattr(bad, name, True)
        with pytest.raises(ValueError, match=f"^low-rank gradients do not work with {reason}"):
            low_rank_optimizer(model, bad, LowRankConfig(rank=8))


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_engines_that_accelerate_launch_chose_are_refused_too(model, tmp_path, monkeypatch, engine):
    """Training arguments say nothing of them."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ValueError, match=f"^low-rank gradients do not work with {engine.lower()}: "):
        low_rank_optimizer(model, args, LowRankConfig(rank=8))
    with pytest.raises(ValueError, match=f"^low-rank gradients do not work with {engine.lower()}: "):
        LowRankGradientCallback(LowRankConfig(rank=8)).on_train_begin(args, None, None, model=model)


@pytest.mark.parametrize("way", ["powersgd", "projected"])
def test_an_exchange_that_only_the_mixin_does_is_refused_without_it(model, tmp_path, way):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=f"^all_reduce is '{way}', but .+; use LowRankMixin"):
        low_rank_optimizer(model, args, LowRankConfig(rank=8, all_reduce=way))


def test_nothing_to_project_is_said(model):
    config = LowRankConfig(rank=4000)
    assert "nothing is projected. Not projected: 16 too small" in describe(plan(model, config), config)
