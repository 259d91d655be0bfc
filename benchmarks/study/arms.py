"""The cells of the study: a PPO tuned on each task, then each mechanism and preset against it on fresh seeds."""

from __future__ import annotations

from itertools import product
from typing import Any

from trl_alpharl import ARPOConfig

from .tasks import UNITS, Task

TUNING_SEEDS = [0, 1, 2, 3, 4]
# The best of 16 is chosen by luck too; it runs again beside what it is compared to.
FRESH_SEEDS = [100, 101, 102, 103, 104]

LEARNING_RATES = {"verifiable": (3e-4, 1e-3), "graded": (1e-3, 3e-3), "drifting": (1e-3, 3e-3)}
GRID = {"num_mini_batches": (1, 4), "adam_beta2": (0.95, 0.999)}
KL_COEFS = {"long": (0.0, 0.008)}  # a rise is worth 1/39 there: no PPO learns it at .008
OTHER_KL_COEFS = (0.008, 0.05)
BEST = "best PPO"
ORACLE = "best PPO, true units"

REPLAY = {"replay_ratio": 0.75, "adam_beta2": 0.95, "num_mini_batches": 2}
CURRICULUM = {"curriculum": "success"}
ROBUST = {"reward_scaling": "robust"}
MECHANISMS: dict[str, dict[str, dict[str, Any]]] = {
    "sparse": {
        "replay .75, beta2 .95, 2 mini-batches": REPLAY,
        "replay .33 by advantage": {"replay_ratio": 0.33, "replay_priority": "advantage"},
        "positive NLL .1": {"positive_nll_coef": 0.1},
        "epsilon .1": {"epsilon_mix": 0.1},
        "logit noise .3": {"logit_noise": 0.3},
        "explained-variance gate": {"explained_variance_gate": True},
        # The share of right digits beside the 0/1 reward: always as much (PPO on the sum of both), or less and less.
        "shaping, constant": {"reward_weights": [1.0, 1.0]},
        "shaping by success": {"shaping_rewards": ["digits"]},
        "shaping linear": {"shaping_rewards": ["digits"], "shaping_schedule": "linear"},
    },
    "dense": {
        "robust scaling": ROBUST,
        "entropy dual": {"entropy_control": "dual"},
        "entropy PI": {"entropy_control": "pi"},
        "lambda to .85": {"lam_end": 0.85},
        "KL stop .008": {"kl_stop": 0.008},
        "RMSNorm noise .01": {"norm_noise": 0.01},
        "reuse_surge 1.5": {"reuse_surge": 1.5},
        # The best PPO ends at 15 nats a completion; the horizon is ten rollouts, which is the published gain of .1.
        "adaptive kl_coef": {"kl_target": 15.0, "kl_horizon": 640},
    },
    "scaled": {
        "running scaling": {"reward_scaling": "running"},
        "batch scaling": {"reward_scaling": "batch"},
        "whiten_rewards": {"whiten_rewards": True},
        "PopArt": {"popart": True},
        "robust scaling, entropy dual": {**ROBUST, "entropy_control": "dual"},
    },
    "multi": {
        # Plain PPO learns the sum of the raw rewards, which is one of the four; this one knows what no script knows.
        ORACLE: {"reward_weights": [1 / unit for unit in UNITS]},
        "robust scaling": ROBUST,
        "robust scaling, moving advantage norm": {**ROBUST, "advantage_norm": "ema"},
        "robust scaling, entropy rewards": {**ROBUST, "entropy_control": "fixed", "entropy_form": "reward"},
    },
    "mixed": {
        "success-targeted prompts": CURRICULUM,
        "success-targeted prompts, replay .75": {**CURRICULUM, **REPLAY},
        "replay .75, beta2 .95, 2 mini-batches": REPLAY,
        "screening with 2": {"screening": 2},
        "positive NLL .1": {"positive_nll_coef": 0.1},
    },
    "long": {
        "critic warm-up": {"critic_warmup_steps": 16},
        "lambda_critic 1": {"lam_critic": 1.0},
        "length-adaptive lambda, lambda_critic 1": {"lam_length_scale": 0.5, "lam_critic": 1.0},
        "explained-variance gate": {"explained_variance_gate": True},
        # A rise is worth 1/39: no penalty of the grid but 0 lets PPO learn. In units of the rewards' spread one may.
        "robust scaling, KL penalty .008": {**ROBUST, "kl_coef": 0.008},
    },
}


def config(task: Task, rollouts: int, batch: int = 64, **changes: Any) -> ARPOConfig:
    """The study's configuration: everything off but what `changes` say."""
    common = {
        "output_dir": "unused",
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": batch,
        "response_length": task.answer_length,
        "temperature": 1.0,
        "total_episodes": rollouts * batch,
        "num_ppo_epochs": 4,
        "lr_scheduler_type": "constant_with_warmup",
        "preset": "ppo",
    }
    return ARPOConfig(**{**common, **changes})


def grid(task: Task) -> dict[str, dict[str, Any]]:
    """PPO over learning rate, mini-batches, Adam's beta2 and the KL coefficient: 16 points."""
    kl_coefs = KL_COEFS.get(task.name, OTHER_KL_COEFS)
    ranges = {"learning_rate": LEARNING_RATES[task.kind], **GRID, "kl_coef": kl_coefs}
    points = [dict(zip(ranges, values)) for values in product(*ranges.values())]
    return {"PPO " + " ".join(f"{name}={value:g}" for name, value in point.items()): point for point in points}


def against(task: Task, best: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What runs beside the best PPO, itself included: its settings and one mechanism, or a preset at its learning
    rate."""
    arms = {BEST: best}
    arms["tuned"] = {"preset": "tuned", "reward_kind": task.kind, "learning_rate": best["learning_rate"]}
    arms["paper"] = {"preset": "paper", "learning_rate": best["learning_rate"]}
    return arms | {name: {**best, **changes} for name, changes in MECHANISMS[task.name].items()}
