"""One notice for what a script sets and what means something else since TRL 1.12; silence otherwise."""

import warnings
from dataclasses import fields

import pytest

from trl_alpharl import PPOConfig
from trl_alpharl.trainers.notices import REPAIRED, RepairedFieldWarning, repaired_fields

# Values for which each notice is due, and values for which it is not.
DUE = {
    "num_mini_batches": {"num_mini_batches": 2, "gradient_accumulation_steps": 2},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "bf16": {"bf16": True},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "stop_token": {"stop_token": None},
    "stop_token_id": {"stop_token_id": 7},
    "kl_estimator": {"kl_estimator": "k2"},
    "max_steps": {"max_steps": 10},
    "save_steps": {"save_steps": 10},
    "eval_steps": {"eval_strategy": "steps", "eval_steps": 10},
    "warmup_steps": {"warmup_steps": 10},
    "local_rollout_forward_batch_size": {"local_rollout_forward_batch_size": 8},
    "num_sample_generations": {"num_sample_generations": 3},
}
NOT_DUE = [
    {},
    {"logging_steps": 1, "learning_rate": 1e-5, "kl_estimator": "k3", "total_episodes": 64},
    {"num_sample_generations": 0},
    {"max_grad_norm": 0.0},
    {"bf16": False},
    {"gradient_checkpointing": False},
    {"stop_token": "eos"},
    {"save_strategy": "no", "save_steps": 5},
    {"eval_steps": 5},
    {"warmup_steps": 0.1},  # a share of the run
]


def make(**changes):
    return PPOConfig(output_dir="unused", use_cpu=True, report_to="none", **changes)


def test_every_repaired_field_exists_and_is_tried_here():
    assert set(REPAIRED) == set(DUE) <= {field.name for field in fields(PPOConfig)}


@pytest.mark.parametrize("name", DUE)
def test_a_repaired_field_that_is_set_gives_its_one_line(name):
    lines = repaired_fields(make(**DUE[name]))
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}={DUE[name][name]!r} ") and "{" not in lines[0]


@pytest.mark.parametrize("values", NOT_DUE)
def test_defaults_and_values_whose_meaning_stayed_give_none(values):
    assert repaired_fields(make(**values)) == []


def test_a_stop_token_id_alone_means_what_it_did_when_stop_token_is_none():
    lines = repaired_fields(make(stop_token=None, stop_token_id=7))
    assert [line.split("=")[0] for line in lines] == ["stop_token"]


def test_steps_are_put_into_rollouts():
    lines = repaired_fields(make(save_steps=12, num_ppo_epochs=3))
    assert lines == ["save_steps=12 counts optimizer steps, 3 a rollout here; 1.12 counted rollouts"]


def test_a_trainer_warns_once_about_all_of_them(trainer):
    with pytest.warns(RepairedFieldWarning, match="docs/migrate.md") as caught:
        trainer(num_mini_batches=2, max_steps=1)
    notices = [warning for warning in caught if warning.category is RepairedFieldWarning]
    assert len(notices) == 1
    lines = str(notices[0].message).splitlines()
    assert [line.split("=")[0].strip() for line in lines[1:]] == ["max_steps", "num_mini_batches"]
    assert notices[0].filename.endswith("conftest.py")  # the line that made the trainer, not one of ours


def test_an_ordinary_run_is_silent(trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer()
