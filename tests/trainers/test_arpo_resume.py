"""A resumed ARPO run becomes, bit for bit, what the straight run became, with every controller on."""

from __future__ import annotations

import json

import pytest
import torch

STEPS = 4  # optimizer steps of a rollout
EVERYTHING = {
    "preset": "ppo",
    "num_mini_batches": 2,
    "kl_target": 0.5,
    "kl_horizon": 50,
    "reward_scaling": "robust",
    "popart": True,
    "shaping_rewards": ["length"],
    "entropy_control": "pi",
    "entropy_form": "both",
    "advantage_norm": "ema",
    "kl_stop": 1e-3,
    "reuse_surge": 1.05,
    "positive_nll_coef": 0.1,
    "logit_noise": 0.3,
    "norm_noise": 0.01,
    "lam_end": 0.8,
    "replay_ratio": 0.5,
    "replay_priority": "advantage",
    "replay_max_age": 2,
    "curriculum": "success",
    "screening": 2,
}


def value(completions, **kwargs):
    words = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(numbers) / (63 * max(1, len(numbers))) for numbers in words]


def length(completions, **kwargs):
    return [None if row == 0 else float(len(text)) for row, text in enumerate(completions)]


@pytest.fixture
def start(arpo, tmp_path):
    def make(folder, **changes):
        values = {**EVERYTHING, "reward_funcs": [value, length], "total_episodes": 32, "learning_rate": 5e-3}
        return arpo(output_dir=str(tmp_path / folder), **{**values, **changes})

    return make


@pytest.mark.parametrize("control", ["pi", "dual"])
@pytest.mark.parametrize("scaling", ["robust", "running", "batch"])
def test_resume_in_the_middle_and_at_the_end_of_a_rollout(start, run_state, assert_same, tmp_path, scaling, control):
    changes = {"reward_scaling": scaling, "entropy_control": control}
    straight = start("straight", save_strategy="steps", save_steps=1, **changes)
    straight.train()
    expected = run_state(straight)
    steps = (9, 10, 12) if (scaling, control) == ("robust", "pi") else (9, 12)
    for step in steps:
        resumed = start(f"resumed-{step}", **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert_same(run_state(resumed), expected, f"resumed at {step}")
        stores = [{name: store.tensors() for name, store in run._stores().items()} for run in (resumed, straight)]
        assert stores[0].keys() == {"replay", "curriculum"}
        for name in stores[0]:
            for key, tensor in stores[0][name].items():
                other = stores[1][name][key]
                assert torch.equal(tensor.nan_to_num(9.0), other.nan_to_num(9.0)), key
    names = set(json.loads((tmp_path / "straight/checkpoint-9/controllers.json").read_text()))
    assert names > {"reward_scaler", "success_rate", "entropy", "advantage_moments", "popart", "gate"}


def test_the_mechanisms_were_at_work(start):
    run = start("straight")
    run.train()
    logs = {
        key: [entry[key] for entry in run.state.log_history if key in entry]
        for key in ("arpo/replayed", "arpo/importance")
    }
    assert logs["arpo/replayed"] == [0, 8, 8, 8] and min(logs["arpo/importance"]) < 0.99
    assert min(entry.get("arpo/policy_steps", 1) for entry in run.state.log_history) == 0


def test_a_mechanism_may_be_switched_off_on_resume(start, tmp_path):
    start("straight", save_strategy="steps", save_steps=4, max_steps=4).train()
    again = start("again", entropy_control="none", entropy_form=None, reward_scaling="none", curriculum="none")
    again.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-4"))
    assert again.state.global_step == 16


@pytest.mark.parametrize(
    ("off", "message"),
    [
        ({"reward_scaling": "none"}, "has no state of 'reward_scaler': the run that saved it had that switched off"),
        (
            {"replay_ratio": 0.0, "replay_priority": None, "replay_max_age": None},
            "has no replay.safetensors: the run that saved it had replay switched off",
        ),
        ({"curriculum": "none"}, "has no curriculum.safetensors"),
    ],
)
def test_a_mechanism_cannot_be_switched_on_in_the_middle(start, tmp_path, off, message):
    start("straight", save_strategy="steps", save_steps=4, max_steps=4, **off).train()
    with pytest.raises(ValueError, match=message):
        start("again").train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-4"))
