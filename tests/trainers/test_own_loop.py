"""A loop of one's own, five lines, is `train()` bit for bit (CASES 31)."""

from __future__ import annotations

import copy

import pytest

from trl_alpharl.metrics_table import is_reproducible


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_mini_batches": 2, "kl_target": 0.5, "kl_horizon": 50, "max_grad_norm": 0.1, "critic": "adapter"},
        {"max_grad_norm": 0.0, "critic_warmup_steps": 2, "gradient_checkpointing": True, "critic_learning_rate": 1e-2},
    ],
)
def test_five_lines_equal_train(trainer, model, lora, assert_same, changes):
    lora = {"peft_config": lora} if "critic" in changes else {}
    steps = 2 * changes.get("num_mini_batches", 1)
    values = {"total_episodes": 24, "logging_steps": steps, **lora, **changes}
    trained = trainer(model=copy.deepcopy(model), **values)
    trained.train()

    own = trainer(model=copy.deepcopy(model), **values)
    metrics = []
    for _ in range(own.args.num_total_batches):
        rollout = own.rollout()
        scored = own.score(rollout)
        experience = own.advantages(scored)
        metrics.append(own.update(experience))

    assert_same(own.model.state_dict(), trained.model.state_dict())
    assert_same(own.optimizer.state_dict(), trained.optimizer.state_dict())
    assert_same(own.lr_scheduler.state_dict(), trained.lr_scheduler.state_dict())
    assert own.kl_controller.state_dict() == trained.kl_controller.state_dict()
    assert own.state.global_step == trained.state.global_step == 3 * steps
    for ours, entry in zip(metrics, trained.state.log_history, strict=False):
        assert {"objective/scores", "loss/value_avg", "episode", "lr"} <= ours.keys()
        for key in filter(is_reproducible, ours):
            assert ours[key] == entry[key], key


def test_a_rollout_sampled_twice_is_planned_twice(trainer):
    """Another policy gives other lengths under the same index."""
    run = trainer(num_ppo_epochs=1)
    first = run.rollout(0)
    run.score(first)
    run.sampling = type(run.sampling)(**{**vars(run.sampling), "stop_ids": tuple(range(1, 30))})
    second = run.rollout(0)
    assert second.lengths() != first.lengths()
    run.score(second)
    prompts, completions = second.lengths()
    assert run.plan(second)[0].lengths == [sum(pair) for pair in zip(prompts, completions)]


def test_the_model_of_an_own_loop_saves(trainer, tmp_path):
    run = trainer()
    run.update(run.advantages(run.score(run.rollout())))
    run.save_model(str(tmp_path / "out"))
    assert (tmp_path / "out" / "critic" / "model.safetensors").is_file()
