"""In a stock transformers Trainer."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from trl_alpharl.lowrank.callback import LowRankGradientCallback, LowRankLogger
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.param_groups import low_rank_optimizer

SPECTRA = json.loads((Path(__file__).parents[1] / "data/gradient_spectra.json").read_text())["spectra"]


class Rows(torch.utils.data.Dataset):
    """16 rows of 8 tokens."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = torch.randint(2, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


class Watch(TrainerCallback):
    """Copies gradients before and after the callbacks that follow or precede it."""

    def __init__(self, into):
        self.into = into

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.into.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


@pytest.fixture
def trainer(model, tmp_path):
    def make(callbacks=(), model=model, **changes):
        values = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "max_steps": 2,
            "logging_steps": 1,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "learning_rate": 1e-3,
        }
        rest = {name: changes.pop(name) for name in ("optimizer_cls_and_kwargs", "optimizers") if name in changes}
        args = TrainingArguments(**{**values, **changes})
        return Trainer(model=model, args=args, train_dataset=Rows(), callbacks=list(callbacks), **rest)

    return make


def steps(trainer) -> list[dict]:
    return [log for log in trainer.state.log_history if "loss" in log]


def test_matrices_get_their_best_approximation_and_the_rest_stays(trainer, model):
    before, after = [], []
    callback = LowRankGradientCallback(LowRankConfig(rank=4, refresh="svd", rank_pattern={"lm_head": 0}))
    trainer([Watch(before), callback, Watch(after)]).train()
    for old, new in zip(before, after):
        for name, gradient in old.items():
            if gradient.ndim < 2 or "lm_head" in name:
                assert torch.equal(new[name], gradient)
                continue
            u, s, v = np.linalg.svd(gradient.numpy(), full_matrices=False)
            assert np.abs(new[name].numpy() - (u[:, :4] * s[:4]) @ v[:4]).max() < 1e-5


def test_the_logged_norm_is_the_full_gradient_s_and_energy_rank_and_time_are_logged(trainer, caplog, model):
    before = []
    with caplog.at_level(logging.WARNING):
        run = trainer([Watch(before), LowRankGradientCallback(LowRankConfig(rank=4))], max_grad_norm=1e9)
        run.train()
    assert sum("low-rank gradients, side in: 16 matrices" in line for line in caplog.messages) == 1
    for log, gradients in zip(steps(run), before):
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        assert log["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert 0 < log["lowrank/energy"] < 1 and log["lowrank/rank"] == 4 and log["lowrank/time_s"] > 0
        assert log["lowrank/skipped"] == 0


def test_the_energy_policy_keeps_the_share_asked_for(trainer):
    config = LowRankConfig(rank=8, rank_policy="energy", energy=0.7, rank_min=2, rank_max=60)
    run = trainer([LowRankGradientCallback(config)])
    run.train()
    log = steps(run)[-1]
    assert 0.69 < log["lowrank/energy"] < 0.95 and 2 < log["lowrank/rank"] < 40


def test_lora_factors_on_a_frozen_trunk(trainer, model, lora):
    before, after = [], []
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["up_proj"], init_lora_weights=False))
    config = LowRankConfig(rank=2, small_lora=True)
    trainer([Watch(before), LowRankGradientCallback(config), Watch(after)], model=adapted).train()
    assert before[0].keys() == after[0].keys() and all("lora_" in name for name in before[0])
    assert all(torch.linalg.matrix_rank(g, rtol=1e-4) <= 2 for g in after[0].values())
    assert any(torch.linalg.matrix_rank(g, rtol=1e-4) > 2 for g in before[0].values())


@pytest.mark.slow
def test_lora_on_an_nf4_trunk(trainer, model, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from trl_alpharl.roles.prepare import keep_quantized_layers_trainable

    model.save_pretrained(tmp_path / "tiny")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", quantization_config=config)
    keep_quantized_layers_trainable(quantized, "model")
    adapted = get_peft_model(quantized, LoraConfig(r=8, target_modules=["up_proj"]))
    run = trainer([LowRankGradientCallback(LowRankConfig(rank=2, small_lora=True))], model=adapted)
    run.train()
    assert steps(run)[-1]["lowrank/rank"] == 2


def test_a_gradient_that_is_not_finite_is_passed_on_and_counted(trainer, model):
    callback = LowRankGradientCallback(LowRankConfig(rank=4))
    run = trainer([callback])
    run.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.lm_head.weight.grad[3, 5] = float("nan")
    spoilt = model.lm_head.weight.grad.clone()
    callback.on_pre_optimizer_step(run.args, run.state, run.control)
    logs = {"loss": 1.0}
    callback.on_log(run.args, run.state, run.control, logs)
    assert logs["lowrank/skipped"] == 1 and logs["lowrank/energy"] == pytest.approx(1, abs=1e-4)
    assert torch.equal(model.lm_head.weight.grad.nan_to_num(9), spoilt.nan_to_num(9))


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("spectrum", SPECTRA[:4], ids=lambda s: s["matrix"])
def test_by_default_a_real_gradient_s_error_is_within_two_percent_of_the_best(spectrum, rank):
    (out, into), values = spectrum["shape"], torch.tensor(spectrum["singular_values"])
    left, right = (torch.linalg.qr(torch.randn(size, len(values)))[0] for size in (out, into))
    layer = torch.nn.Linear(into, out, bias=False)
    layer.weight.grad = (left * values) @ right.T
    whole = layer.weight.grad.double()
    callback, args = LowRankGradientCallback(LowRankConfig(rank=rank)), SimpleNamespace()
    callback.on_train_begin(args, None, None, model=layer)
    callback.on_pre_optimizer_step(args, SimpleNamespace(global_step=3), None)
    error = (whole - layer.weight.grad.double()).norm()
    assert 1 - 1e-4 < error / values[rank:].double().norm() < 1.02


def test_gradients_that_an_fp16_scaler_scaled_give_the_scaled_approximation(model):
    """So that it does not matter whether they are unscaled before; one that overflowed still shows."""
    found, args = [], SimpleNamespace(fp16=True)
    ids = torch.arange(2, 26).view(3, 8)
    for scale in (1.0, 2.0**12):
        callback = LowRankGradientCallback(LowRankConfig(rank=4))
        callback.on_train_begin(args, None, None, model=model)
        model.zero_grad()
        (model(input_ids=ids, labels=ids).loss * scale).backward()
        callback.on_pre_optimizer_step(args, SimpleNamespace(global_step=1), None)
        found.append(model.lm_head.weight.grad / scale)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    model.lm_head.weight.grad[0, 0] = float("inf")
    callback.on_pre_optimizer_step(args, SimpleNamespace(global_step=2), None)
    assert model.lm_head.weight.grad.isinf().any()


def test_two_equal_runs_see_the_same_bases(trainer, model):
    ends = []
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model.load_state_dict(start)
        trainer([LowRankGradientCallback(LowRankConfig(rank=4))]).train()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_both_at_once_is_an_error(trainer, model, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    way = {"optimizer_cls_and_kwargs": low_rank_optimizer(model, args, LowRankConfig(rank=4))}
    run = trainer([LowRankGradientCallback(LowRankConfig(rank=4))], **way)
    with pytest.raises(ValueError, match=r"^LowRankGradientCallback and LowRankAdamW are both configured"):
        run.train()


def test_the_optimizer_by_class_and_kwargs_clips_to_the_trainer_s_norm_and_logs_the_whole_one(model, trainer):
    """Case 35, without the mixin."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ends, logs = {}, {}
    for limit in (1e-6, 1e6):
        model.load_state_dict(start)
        args = trainer(max_grad_norm=limit).args
        way = low_rank_optimizer(model, args, LowRankConfig(rank=4))
        way[1]["eps"] = 1e-3
        run = trainer([LowRankLogger()], max_grad_norm=limit, optimizer_cls_and_kwargs=way)
        run.train()
        ends[limit] = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        logs[limit] = steps(run)
    moved = {limit: (end - start["model.layers.0.mlp.up_proj.weight"]).norm() for limit, end in ends.items()}
    assert moved[1e-6] < 0.01 * moved[1e6]
    assert logs[1e6][0]["grad_norm"] > 0.1 and logs[1e6][0]["lowrank/rank"] == 4


def test_the_logger_notices_another_optimizer(trainer):
    """Trap A5."""
    with pytest.raises(RuntimeError, match=r"^LowRankLogger belongs to LowRankAdamW, but the trainer uses AdamW"):
        trainer([LowRankLogger()]).train()
