"""A run that is stopped and resumed becomes, bit for bit, what the straight run became (CASES 14)."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from trl_alpharl.trainers.checkpoints import load_experience

pytestmark = pytest.mark.trl_compat
STEPS = 4  # optimizer steps of a rollout: two epochs of two mini-batches


class DrawsFromGlobalRandomness(TrainerCallback):
    """A user's callback that draws from every global generator, and notes what it drew."""

    def __init__(self):
        self.drawn = {}

    def _draw(self, state):
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        self.drawn.setdefault(state.global_step, []).append(numbers)

    def on_step_end(self, args, state, control, **kwargs):
        self._draw(state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._draw(state)


@pytest.fixture
def start(trainer, model, classifier, lora, tmp_path):
    """A fresh trainer of one kind; its runs save after every step."""
    kinds = {
        "full": {},
        "lora-shared": {"peft_config": lora},
        "lora-adapter": {"peft_config": lora, "critic": "adapter"},
        "value-model": {"peft_config": lora, "value_model": classifier},
    }

    def make(kind="full", folder="straight", **changes):
        own = {
            name: copy.deepcopy(value) for name, value in kinds[kind].items()
        }  # a run trains what it was given in place
        values = {"num_mini_batches": 2, "kl_target": 0.5, "kl_horizon": 50, "save_strategy": "steps", "save_steps": 1}
        return trainer(model=copy.deepcopy(model), output_dir=str(tmp_path / folder), **{**values, **own, **changes})

    return make


@pytest.mark.parametrize(
    ("kind", "logging_steps"), [("full", 1), ("full", 3), ("lora-shared", 3), ("lora-adapter", 1), ("value-model", 3)]
)
def test_resume_at_any_step_of_a_rollout(start, run_state, assert_same, tmp_path, kind, logging_steps):
    sizes = {"total_episodes": 16, "logging_steps": logging_steps}
    straight = start(kind, **sizes)
    straight.train()
    expected = run_state(straight)
    assert len({entry["objective/kl_coef"] for entry in expected["logs"] if "objective/kl_coef" in entry}) == 2
    for step in (1, 2, 3, 4):  # inside the first rollout, and at its end
        resumed = start(kind, folder=f"resumed-{step}", save_strategy="no", **sizes)
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert_same(run_state(resumed), expected, f"resumed at {step}")


def test_six_updates_equal_three_and_three_over_a_pass_of_the_data(start, run_state, assert_same, tmp_path, dataset):
    """Shuffled prompts; the dataset ends in the middle of a rollout, twice."""
    sizes = {"total_episodes": 48, "train_dataset": dataset.select(range(20))}
    straight = start(save_strategy="no", **sizes)
    straight.train()
    first_half = start(folder="half", save_steps=3, **sizes)
    first_half.add_callback(_StopAt(3 * STEPS))
    first_half.train()
    assert first_half.state.global_step == 3 * STEPS
    resumed = start(folder="half", save_steps=3, **sizes)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6 * STEPS
    assert_same(run_state(resumed), run_state(straight))
    epochs = [entry["epoch"] for entry in resumed.state.log_history]
    assert epochs == sorted(epochs) and epochs[-1] == 48 / 20


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


def test_evaluation_and_callbacks_that_draw_numbers_change_nothing(start, run_state, assert_same, tmp_path, dataset):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset.select(range(3))}
    bare = start(folder="bare", save_strategy="no", total_episodes=16)
    bare.train()
    noisy = DrawsFromGlobalRandomness()
    straight = start(total_episodes=16, callbacks=[noisy], num_sample_generations=1, **evaluated)
    straight.train()
    assert_same(run_state(straight)["weights"], run_state(bare)["weights"])
    for step in (2, 4):
        again = DrawsFromGlobalRandomness()
        resumed = start(
            folder=f"resumed-{step}", total_episodes=16, callbacks=[again], num_sample_generations=1, **evaluated
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert_same(run_state(resumed), run_state(straight), f"resumed at {step}")
        assert_same(again.drawn, {at: drawn for at, drawn in noisy.drawn.items() if at > step})


def test_the_rollout_travels_only_while_it_is_in_use(start, tmp_path, assert_same):
    run = start(total_episodes=16)
    seen = {}

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen[state.global_step] = run._experience

    run.add_callback(Look())
    run.train()
    saved = {step: tmp_path / "straight" / f"checkpoint-{step}" / "rollout.safetensors" for step in range(1, 9)}
    assert [step for step, path in saved.items() if path.is_file()] == [1, 2, 3, 5, 6, 7]
    for step in (1, 7):
        record = load_experience(saved[step], torch.device("cpu"))
        for part, original in (
            (record, seen[step]),
            (record.scored, seen[step].scored),
            (record.scored.rollout, seen[step].scored.rollout),
        ):
            for name, value in vars(part).items():
                if name not in ("scored", "rollout", "examples"):
                    assert_same(value, getattr(original, name), name)


def test_no_rollout_is_generated_again(start, tmp_path, monkeypatch):
    start(total_episodes=16).train()
    resumed = start(folder="resumed", total_episodes=16)
    monkeypatch.setattr(resumed, "rollout", lambda index: pytest.fail(f"rollout {index} was generated again"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-6"))
    assert resumed.state.global_step == 8
    clocked = [entry["time/update_s"] for entry in resumed.state.log_history if "time/update_s" in entry]
    assert 0 < clocked[-1] < 60  # counted from the resume, not from 1970


def test_a_second_training_call_starts_with_a_rollout_of_its_own(start):
    run = start(total_episodes=16)
    stop = _StopAt(2)
    run.add_callback(stop)
    run.train()
    left = run._experience
    assert left is not None
    stop.step = 3
    run.train()
    assert run._experience is not left and run._experience.scored.rollout.index == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_mini_batches": 1}, "num_mini_batches=2; this run has 1"),
        ({"num_ppo_epochs": 1}, "num_ppo_epochs=2; this run has 1"),
        ({"gradient_accumulation_steps": 8}, "batch_size=8; this run has 16"),
    ],
)
def test_a_run_of_other_sizes_does_not_resume(start, trainer, model, tmp_path, change, message):
    start(total_episodes=8).train()
    other = trainer(**{"num_mini_batches": 2, "kl_target": 0.5, "kl_horizon": 50, "total_episodes": 8, **change})
    with pytest.raises(ValueError, match=message):
        other.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))


def test_a_finished_run_stays_finished(trainer, model, tmp_path):
    first = trainer(model=copy.deepcopy(model), save_strategy="steps", save_steps=4, max_steps=4)
    first.train()
    again = trainer(model=copy.deepcopy(model), max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    assert again.state.global_step == 4
    pairs = zip(first.model.parameters(), again.model.parameters())
    assert all(torch.equal(before, after) for before, after in pairs)
