"""What is not finite costs its step and nothing else; what stays so stops the run by name (CASES 28)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import TrainerCallback

from trl_alpharl.trainers.faults import FaultCounter


def bad_rewards(*rollouts, value=float("nan")):
    """A reward function that gives `value` to one row of these rollouts."""
    calls = iter(range(1000))

    def reward(prompts, completions, **kwargs):
        call = next(calls)
        scores = [float(len(text)) for text in completions]
        if call in rollouts:
            scores[3] = value
        return scores

    return reward


class Watch(TrainerCallback):
    """Weights and moments after every step."""

    def __init__(self):
        self.weights, self.moments = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        self.moments.append(copy.deepcopy(optimizer.state_dict()["state"]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_reward_costs_its_rollout(trainer, assert_same, value):
    watch = Watch()
    run = trainer(
        total_episodes=24, reward_funcs=bad_rewards(1, value=value), callbacks=[watch], weight_decay=0.1, max_steps=6
    )
    run.train()
    for step in (2, 3):  # the two steps of the second rollout
        assert_same(watch.weights[step], watch.weights[1])
        assert_same(watch.moments[step], watch.moments[1])
    assert any(not torch.equal(watch.weights[4][name], tensor) for name, tensor in watch.weights[1].items())
    assert [entry["val/skipped_steps"] for entry in run.state.log_history[:-1]] == [0, 0, 1, 2, 2, 2]
    assert [entry["grad_norm"] == 0 for entry in run.state.log_history[:-1]] == [False, False, True, True, False, False]
    assert "objective/scores" not in run.state.log_history[2]  # nor does it spoil a mean
    assert all(torch.isfinite(tensor).all() for tensor in run.model.state_dict().values())


def test_three_bad_rollouts_in_a_row_stop_the_run(trainer):
    run = trainer(total_episodes=64, reward_funcs=bad_rewards(1, 3, 4, 5))
    with pytest.raises(FloatingPointError, match="3 faults in a row: reward 'reward' is not finite"):
        run.train()
    assert run.state.global_step == 10  # five rollouts; two bad ones and a good one in between did not stop it


def spoil_gradient(run, *steps):
    """Let the value head's gradient be NaN in these optimizer steps."""

    def hook(gradient):
        return gradient * float("nan") if run.state.global_step in steps else gradient

    run.model.value_head.weight.register_hook(hook)


def test_a_gradient_that_is_not_finite_costs_its_step(trainer, assert_same):
    watch = Watch()
    run = trainer(total_episodes=24, callbacks=[watch], weight_decay=0.1)
    spoil_gradient(run, 2, 3)
    run.train()
    assert_same(watch.weights[3], watch.weights[1])
    assert_same(watch.moments[3], watch.moments[1])
    assert any(not torch.equal(watch.weights[4][name], tensor) for name, tensor in watch.weights[1].items())
    logs = run.state.log_history
    assert [entry["val/skipped_steps"] for entry in logs[1:6]] == [0, 1, 2, 2, 2]
    assert "loss/policy_avg" not in logs[2] and "loss/policy_avg" in logs[4]


def test_three_bad_gradients_in_a_row_stop_the_run(trainer):
    run = trainer(total_episodes=24)
    spoil_gradient(run, 1, 2, 3)
    with pytest.raises(FloatingPointError, match="3 faults in a row: the gradient is not finite"):
        run.train()


def test_a_loss_that_is_not_finite_costs_its_step_and_is_named(trainer, monkeypatch):
    run = trainer(total_episodes=24)
    value_loss = run.value_loss

    def spoiled(*args):
        loss, sums = value_loss(*args)
        return (loss * float("inf"), {**sums, "loss/value_avg": loss.detach() * float("inf")})

    monkeypatch.setattr(run, "value_loss", spoiled)
    with pytest.raises(FloatingPointError, match="3 faults in a row: loss/value_avg is not finite"):
        run.train()
    assert all(torch.isfinite(tensor).all() for tensor in run.model.state_dict().values())


def spoil_weight(model, name):
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[0] = float("nan")


class SpoilAt(TrainerCallback):
    def __init__(self, step, name):
        self.step, self.name = step, name

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            spoil_weight(model, self.name)


@pytest.mark.parametrize("step", [1, 2])  # inside a rollout, and before the next one is sampled
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("full", "policy.model.layers.1.mlp.up_proj.weight"),
        ("full", "value_head.weight"),
        ("lora", "policy.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"),
        ("lora", "policy.base_model.model.model.layers.1.mlp.up_proj.weight"),  # frozen
        ("lora", "policy.base_model.model.model.layers.0.self_attn.v_proj.lora_B.critic.weight"),
        ("value", "value_model.score.weight"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(trainer, lora, classifier, kind, name, step):
    kinds = {
        "full": {},
        "lora": {"peft_config": lora, "critic": "adapter"},
        "value": {"value_model": classifier},
    }
    run = trainer(total_episodes=24, callbacks=[SpoilAt(step, name)], **kinds[kind])
    with pytest.raises(FloatingPointError, match=f"parameter '{name}' holds NaN or infinity"):
        run.train()
    assert run.state.global_step == step


def test_a_frozen_reference_that_is_not_finite_is_named(trainer):
    name = "reference.model.layers.0.input_layernorm.weight"
    run = trainer(total_episodes=24, callbacks=[SpoilAt(2, name)])
    with pytest.raises(FloatingPointError, match=f"parameter '{name}'"):
        run.train()


def test_faults_travel_in_the_checkpoint(trainer, model, run_state, assert_same, tmp_path):
    """Stopped inside a rollout whose reward was bad: the rest of it is skipped after the resume too."""
    values = {"total_episodes": 24, "num_mini_batches": 2, "save_strategy": "steps", "save_steps": 1}
    start = copy.deepcopy(model)
    straight = trainer(**values, reward_funcs=bad_rewards(1))
    straight.train()
    resumed = trainer(**values, model=start, reward_funcs=bad_rewards(), output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-6")
    assert_same(run_state(resumed), run_state(straight))
    assert resumed.faults.skipped_steps == 4


def test_the_counter():
    counter = FaultCounter()
    for _ in range(2):
        counter.record("the reward", 4)
        counter.record("the reward", 4)
        counter.good_step()
        counter.skipped_step()
    assert counter.skipped_steps == 2
    again = FaultCounter()
    counter.record("the gradient", 1)
    again.load_state_dict(counter.state_dict())
    again.record("the gradient", 1)
    with pytest.raises(FloatingPointError, match="3 faults in a row: the gradient is not finite"):
        again.record("the gradient", 1)
