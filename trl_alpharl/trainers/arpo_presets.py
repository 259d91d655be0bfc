"""What `ARPOConfig` puts where a script says nothing: the presets, and the defaults of fields that hang on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# Every mechanism switched off.
OFF: dict[str, Any] = {
    "reward_scaling": "none",
    "popart": False,
    "entropy_control": "none",
    "lam_length_scale": 0.0,
    "advantage_norm": "batch",
    "explained_variance_gate": False,
    "kl_stop": 0.0,
    "reuse_surge": 0.0,
    "positive_nll_coef": 0.0,
    "logit_noise": 0.0,
    "epsilon_mix": 0.0,
    "norm_noise": 0.0,
    "replay_ratio": 0.0,
    "curriculum": "none",
    "screening": 0,
}

# By the kind of reward, as measured against a tuned PPO (docs/arpo.md). On 0/1 rewards replay with quick moments takes
# 24 to 31 % fewer episodes; the curriculum beside it showed neither gain nor harm. On graded rewards nothing beat more
# steps a rollout. Where scales move, robust scaling doubles the final score.
TUNED: dict[str, dict[str, Any]] = {
    "verifiable": {"replay_ratio": 0.75, "adam_beta2": 0.95, "num_mini_batches": 2, "curriculum": "success"},
    "graded": {"num_mini_batches": 4, "kl_coef": 0.008},
    "drifting": {"num_mini_batches": 4, "kl_coef": 0.008, "reward_scaling": "robust"},
}

# The description, literally. It gives no amount for "noise injection"; 0.1 is ours. It asks for replay of very large
# models only, so replay stays off.
PAPER: dict[str, Any] = {
    "reward_scaling": "robust",
    "entropy_control": "dual",
    "entropy_form": "both",
    "entropy_coef": 0.01,
    "kl_coef": 0.0,
    "gamma": 0.99,
    "lam": 0.95,
    "lam_end": 0.85,
    "kl_stop": 0.008,
    "logit_noise": 0.1,
    "epsilon_mix": 0.1,
    "curriculum": "success",
    "adam_beta2": 0.99,
    "warmup_steps": 0.05,
}


def preset_values(preset: str, reward_kind: str | None) -> dict[str, Any]:
    """What a preset sets, fields of PPO and of `TrainingArguments` included; every switch of ARPO is among them."""
    chosen = {"tuned": TUNED[reward_kind or "graded"], "paper": PAPER, "ppo": {}}[preset]
    return {**OFF, **chosen}


class Dependent(NamedTuple):
    """A field that only matters while others are switched on."""

    default: Any
    matters: Callable[[Any], bool]
    switch: str  # in words, for the message


def _scaled(config: Any) -> bool:
    return config.reward_scaling != "none"


def _steered(config: Any) -> bool:
    return config.entropy_control in ("dual", "pi")


def _mixed(config: Any) -> bool:
    return config.epsilon_mix > 0


def off_policy(config: Any) -> bool:
    """Whether some tokens come from another policy than the one that is trained."""
    return config.replay_ratio > 0 or config.logit_noise > 0 or _mixed(config) or config.norm_noise > 0


def judges_success(config: Any) -> bool:
    """Whether some mechanism asks which completions succeeded."""
    shaped = bool(config.shaping_rewards) and config.shaping_schedule in (None, "success")
    return shaped or config.curriculum == "success" or config.screening > 0 or config.positive_nll_coef > 0


_SCALED = (_scaled, "reward_scaling is none")
_SHAPED = (lambda config: bool(config.shaping_rewards), "shaping_rewards names none")
_ENTROPY = (lambda config: config.entropy_control != "none", "entropy_control is none")
_STEERED = (_steered, "entropy_control is neither dual nor pi")
_PI = (lambda config: config.entropy_control == "pi", "entropy_control is not pi")
_REPLAYED = (lambda config: config.replay_ratio > 0, "replay_ratio is 0")
_OFF_POLICY = (off_policy, "nothing is sampled off-policy (no exploration, no replay)")
_CURRICULUM = (lambda config: config.curriculum == "success", "curriculum is none")

DEPENDENT: dict[str, Dependent] = {
    "reward_scale_decay": Dependent(
        0.9, lambda config: config.reward_scaling == "robust", "reward_scaling is not robust"
    ),
    "reward_sigma_min": Dependent(0.0, *_SCALED),
    "reward_clip": Dependent(3.0, *_SCALED),
    "popart_decay": Dependent(0.9, lambda config: config.popart, "popart is off"),
    "shaping_schedule": Dependent("success", *_SHAPED),
    "shaping_coef": Dependent(1.0, *_SHAPED),
    "success_threshold": Dependent(0.5, judges_success, "nothing asks which completions succeed"),
    "entropy_form": Dependent("loss", *_ENTROPY),
    "entropy_coef": Dependent(0.01, *_ENTROPY),
    "entropy_coef_min": Dependent(0.0, *_STEERED),
    "entropy_coef_max": Dependent(0.05, *_STEERED),
    "entropy_rate": Dependent(0.02, lambda config: config.entropy_control == "dual", "entropy_control is not dual"),
    "entropy_kp": Dependent(1.0, *_PI),
    "entropy_ki": Dependent(0.1, *_PI),
    "entropy_start": Dependent(0.8, *_STEERED),
    "entropy_end": Dependent(0.3, *_STEERED),
    "epsilon_top_p": Dependent(1.0, _mixed, "epsilon_mix is 0"),
    "norm_noise_end": Dependent(1e-4, lambda config: config.norm_noise > 0, "norm_noise is 0"),
    "exploration_anneal": Dependent(
        1.0, lambda config: config.logit_noise > 0 or _mixed(config), "logit_noise and epsilon_mix are 0"
    ),
    "rho_max": Dependent(1.0, *_OFF_POLICY),
    "c_max": Dependent(1.0, *_OFF_POLICY),
    "replay_priority": Dependent("uniform", *_REPLAYED),
    "replay_size": Dependent(512, *_REPLAYED),
    "replay_max_age": Dependent(8, *_REPLAYED),
    "success_target": Dependent(0.5, *_CURRICULUM),
    "curriculum_width": Dependent(0.25, *_CURRICULUM),
}
