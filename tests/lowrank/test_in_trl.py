"""TRL's trainers take the mixin and the callback as they are."""

import copy

import pytest
from datasets import Dataset

from trl_alpharl.lowrank.callback import LowRankGradientCallback
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.mixin import LowRankMixin

pytestmark = pytest.mark.trl_compat

COMMON = {
    "max_steps": 2,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def sft(tmp_path):
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"text": ["w5 w6 w7 w8 w9"] * 16})
    return SFTTrainer, {"args": SFTConfig(output_dir=str(tmp_path), **COMMON), "train_dataset": rows}


def dpo(tmp_path):
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_dict({"prompt": ["w5 w6"] * 16, "chosen": ["w7 w8"] * 16, "rejected": ["w9 w10"] * 16})
    return DPOTrainer, {"args": DPOConfig(output_dir=str(tmp_path), **COMMON), "train_dataset": rows}


def grpo(tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    rows = Dataset.from_dict({"prompt": ["w5 w6"] * 16})
    args = GRPOConfig(output_dir=str(tmp_path), num_generations=2, max_completion_length=4, **COMMON)
    reward = lambda completions, **kwargs: [float(len(set(text.split()))) for text in completions]  # noqa: E731
    return GRPOTrainer, {"args": args, "train_dataset": rows, "reward_funcs": reward}


@pytest.mark.parametrize("way", ["mixin", "callback"])
@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_it_trains(make, way, model, tokenizer, tmp_path):
    cls, kwargs = make(tmp_path)
    kwargs |= {"model": model, "processing_class": tokenizer}
    if make is dpo:
        kwargs["ref_model"] = copy.deepcopy(model)  # else it is loaded by the model's name, which has none
    config = LowRankConfig(rank=8)
    if way == "mixin":
        trainer = type("LowRankTrainer", (LowRankMixin, cls), {})(**kwargs, low_rank=config)
    else:
        trainer = cls(**kwargs, callbacks=[LowRankGradientCallback(config)])
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["lowrank/rank"] for log in logs] == [8, 8] and logs[-1]["grad_norm"] > 0
    assert (model.model.layers[0].mlp.up_proj.weight != before).any()
