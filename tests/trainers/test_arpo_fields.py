"""Every field of ARPO changes something that a stage gives, or is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from trl_alpharl.knobs import ARPOKnobs
from trl_alpharl.trainers.arpo_config import ARPOConfig

PPO = {"preset": "ppo"}
SCALED = {**PPO, "reward_scaling": "robust"}
SHAPED = {**PPO, "shaping_rewards": ["size"]}
DUAL = {**PPO, "entropy_control": "dual", "entropy_form": "reward", "entropy_rate": 0.3}
PI = {**PPO, "entropy_control": "pi", "entropy_form": "reward"}
REPLAY = {**PPO, "replay_ratio": 0.3}
CURRICULUM = {**PPO, "curriculum": "success"}

# field: (the other fields, another value than the one that the field has there)
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "preset": ({}, "paper"),
    "reward_kind": ({}, "drifting"),
    "reward_scaling": (PPO, "running"),
    "reward_scale_decay": (SCALED, 0.1),
    "reward_sigma_min": (SCALED, 5.0),
    "reward_clip": (SCALED, 0.5),
    "popart": (PPO, True),
    "popart_decay": ({**PPO, "popart": True}, 0.1),
    "shaping_rewards": (PPO, ["size"]),
    "shaping_schedule": (SHAPED, "cosine"),
    "shaping_coef": (SHAPED, 0.3),
    "success_threshold": ({**CURRICULUM, "success_target": 0.9}, 5.0),
    "entropy_control": (PPO, "fixed"),
    "entropy_form": ({**PPO, "entropy_control": "fixed"}, "reward"),
    "entropy_coef": ({**PPO, "entropy_control": "fixed"}, 0.2),
    "entropy_coef_min": (DUAL, -0.1),
    "entropy_coef_max": ({**DUAL, "entropy_start": 2.0, "entropy_end": 2.0}, 0.5),
    "entropy_rate": ({**DUAL, "entropy_start": 2.0, "entropy_end": 2.0}, 0.001),
    "entropy_kp": ({**PI, "entropy_start": 1.01}, 0.01),
    "entropy_ki": ({**PI, "entropy_start": 1.01, "entropy_end": 1.01}, 0.9),
    "entropy_start": ({**DUAL, "entropy_coef_min": -1.0}, 0.5),
    "entropy_end": ({**DUAL, "entropy_coef_min": -1.0}, 0.9),
    "lam_end": (PPO, 0.3),
    "lam_length_scale": (PPO, 0.5),
    "advantage_norm": (PPO, "ema"),
    "explained_variance_gate": (PPO, True),
    "kl_stop": (PPO, 0.005),
    "reuse_surge": (PPO, 2.0),
    "positive_nll_coef": (PPO, 0.5),
    "logit_noise": (PPO, 0.5),
    "epsilon_mix": (PPO, 0.5),
    "epsilon_top_p": ({**PPO, "epsilon_mix": 0.5}, 0.1),
    "norm_noise": (PPO, 0.1),
    "norm_noise_end": ({**PPO, "norm_noise": 0.1}, 0.05),
    "exploration_anneal": ({**PPO, "logit_noise": 0.5}, 0.0),
    "rho_max": ({**PPO, "logit_noise": 1.0}, 0.3),
    "c_max": ({**PPO, "logit_noise": 1.0}, 0.3),
    "replay_ratio": (PPO, 0.5),
    "replay_priority": (REPLAY, "advantage"),
    "replay_size": (REPLAY, 3),
    "replay_max_age": (REPLAY, 1),
    "curriculum": (PPO, "success"),
    "success_target": (CURRICULUM, 1.0),
    "curriculum_width": (CURRICULUM, 0.01),
    "screening": (PPO, 2),
    # of PPO and of TrainingArguments, which a preset may set
    "num_mini_batches": ({}, 2),
    "kl_coef": ({}, 0.9),
    "gamma": ({}, 0.5),
    "lam": ({}, 0.1),
    "adam_beta2": ({}, 0.5),
    "warmup_steps": ({}, 0.5),
}


def even(completions, **kwargs):
    return [float(int(text.split()[0][1:]) % 2 == 0) if text.split() else 0.0 for text in completions]


def size(completions, **kwargs):
    return [sum(int(word[1:]) for word in text.split() if word[0] == "w") / 100 for text in completions]


def observe(run) -> list[Any]:
    """What the stages give over three rollouts, no optimizer step in between, and how the optimizer is set."""
    with torch.no_grad():
        run.policy_model.lm_head.weight.mul_(1.1)  # a policy that has left the reference
    seen: list[Any] = [run.args.get_warmup_steps(run.args.max_steps)]
    seen += [group["betas"] for group in run.create_optimizer().param_groups]
    for index in range(3):
        first = index * run.args.steps_per_rollout
        run.state.global_step = first
        rollout = run.rollout(index)
        experience = run.advantages(run.score(rollout))
        seen += [rollout.completion_ids, rollout.behavior_logps, rollout.replayed]
        seen += [experience.token_rewards, experience.advantages, experience.returns]
        batch = run.mini_batch(experience, first)
        seen += [len(batch["rows"]), run.training_step(run.model, batch).detach()]
        seen.append(run.policy_model.lm_head.weight.grad.clone())
        run.model.zero_grad()
        run.state.global_step = first + run.args.num_mini_batches  # the second epoch, where gates look
        moved = {"loss/policy_avg": 0.0, "arpo/update_kl": 0.01, "arpo/head_gradient_squared": 1e6}
        seen += [run.admit_step(moved), run.policy_learns()]
        run.after_update(experience)
    return seen


def differ(first: list[Any], second: list[Any]) -> bool:
    def unlike(one, other):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.shape != other.shape or not torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
        return type(one) is not type(other) or one != other

    return len(first) != len(second) or any(unlike(one, other) for one, other in zip(first, second))


def test_every_field_is_in_the_table():
    overridden = set(ARPOConfig.__annotations__) - {"chosen_by_preset"}
    assert set(CHANGES) == {field.name for field in fields(ARPOKnobs)} | overridden


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_field_changes_what_some_stage_gives(arpo, dataset, name):
    others, value = CHANGES[name]
    settings = {"reward_funcs": [even, size], "reward_weights": [1.0, 0.3], "total_episodes": 24}
    settings["train_dataset"] = dataset.select(range(12))  # so few that prompts come back
    without = arpo(**settings, **others)
    changed = arpo(**settings, **{**others, name: value})
    assert getattr(without.args, name) != value
    assert differ(observe(without), observe(changed))


def test_the_observation_repeats(arpo):
    """Else the test above could not fail."""
    settings = {
        "reward_funcs": [even, size],
        "total_episodes": 24,
        "preset": "paper",
        "replay_ratio": 0.3,
        "screening": 2,
    }
    assert not differ(observe(arpo(**settings)), observe(arpo(**settings)))
