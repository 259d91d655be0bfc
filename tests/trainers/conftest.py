"""What the tests of runs share: comparing two runs bit for bit, and reading what a run logged."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trl_alpharl.metrics_table import is_reproducible
from trl_alpharl.trainers import ppo_trainer  # noqa: F401  loaded before the freeze below


@pytest.fixture(scope="session", autouse=True)
def _quick_garbage_collection():
    """Each `train()` collects garbage; setting aside what the imports left saves half a second a run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def same(first: Any, second: Any, where: str = "") -> None:
    """Assert that two nested structures of tensors and numbers are equal, bit for bit."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for index, (one, other) in enumerate(zip(first, second)):
            same(one, other, f"{where}[{index}]")
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second), where
    else:
        assert first == second, where


@pytest.fixture
def assert_same() -> Callable:
    """`same`, as a fixture: test files cannot import each other."""
    return same


@pytest.fixture
def run_state() -> Callable:
    """All that a run has become: weights of all roles, optimizer, schedule, controllers, reproducible logs."""

    def take(trainer: Any) -> dict[str, Any]:
        return {
            "weights": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
            "optimizer": copy.deepcopy(trainer.optimizer.state_dict()),
            "scheduler": copy.deepcopy(trainer.lr_scheduler.state_dict()),
            "controllers": {name: part.state_dict() for name, part in trainer._controllers().items()},
            "step": trainer.state.global_step,
            "logs": [
                {key: value for key, value in entry.items() if is_reproducible(key)}
                for entry in trainer.state.log_history
            ],
        }

    return take


@pytest.fixture
def deep(model):
    """The tiny policy with four layers."""
    torch.manual_seed(0)
    return type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 4}))


@pytest.fixture
def arpo(model, tokenizer, dataset, tmp_path) -> Callable:
    """A factory of the tiny set-up's ARPOTrainer. Keywords of ARPOConfig go into the config, others to the trainer."""
    from dataclasses import fields

    from trl_alpharl import ARPOConfig, ARPOTrainer

    names = {field.name for field in fields(ARPOConfig)}
    tiny = {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_ppo_epochs": 2,
        "total_episodes": 16,
        "response_length": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_sample_generations": 0,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 7,
    }

    def count_word(completions, **kwargs):
        return [float(sum(word in ("w5", "w6", "w7") for word in text.split())) for text in completions]

    def make(**changes: Any):
        knobs = {name: value for name, value in changes.items() if name in names}
        rest = {name: value for name, value in changes.items() if name not in names}
        values = {"processing_class": tokenizer, "train_dataset": dataset, "reward_funcs": count_word}
        args = ARPOConfig(**{**tiny, **knobs})
        return ARPOTrainer(args=args, **{"model": copy.deepcopy(model), **values, **rest})

    return make
