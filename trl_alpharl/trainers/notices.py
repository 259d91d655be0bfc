"""What a script that sets a field should know when the field's meaning was repaired since TRL 1.12."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple


class RepairedFieldWarning(UserWarning):
    """Fields that a script sets mean something else than in TRL 1.12."""


class Repair(NamedTuple):
    """What changed about a field, and for which values of it that matters."""

    meaning: str
    matters: Callable[[Any], bool] = lambda args: True


_STEPS = "counts optimizer steps, {steps} a rollout here"

REPAIRED: dict[str, Repair] = {
    "num_mini_batches": Repair("is the number of optimizer steps per PPO epoch; 1.12 stepped as often whatever it was"),
    "max_grad_norm": Repair("clips every step; 1.12 never clipped", lambda args: args.max_grad_norm > 0),
    "bf16": Repair("is honoured; 1.12 ignored it", lambda args: args.bf16 and not args.bf16_by_hardware),
    "gradient_checkpointing": Repair(
        "recomputes activations of policy and critic; 1.12 ignored it", lambda args: args.gradient_checkpointing
    ),
    "stop_token": Repair("means exactly response_length tokens unless stop_token_id is set; the default is now 'eos'"),
    "stop_token_id": Repair(
        "is added to the eos tokens; 1.12 stopped at it alone, which stop_token=None keeps",
        lambda args: args.stop_token is not None,
    ),
    "kl_estimator": Repair("is the squared estimator; 1.12 had k1 and k3", lambda args: args.kl_estimator == "k2"),
    "max_steps": Repair("is the number of optimizer steps of the run; 1.12 ignored it"),
    "save_steps": Repair(f"{_STEPS}; 1.12 counted rollouts", lambda args: args.save_strategy == "steps"),
    "eval_steps": Repair(f"{_STEPS}; 1.12 never evaluated", lambda args: args.eval_strategy == "steps"),
    "warmup_steps": Repair(
        f"{_STEPS}, as the schedule does; 1.12 counted rollouts", lambda args: args.warmup_steps >= 1
    ),
    "local_rollout_forward_batch_size": Repair(
        "is the number of completions generated at once; scoring runs in the chunks of training"
    ),
    "num_sample_generations": Repair(
        "samples its tables at the run's temperature; 1.12 took 0.01", lambda args: args.num_sample_generations > 0
    ),
}


def repaired_fields(args: Any) -> list[str]:
    """One line for every repaired field of a `PPOConfig` that is not at its default and whose change matters there."""
    lines = []
    unset = getattr(args, "chosen_by_preset", ())
    for field in fields(args):
        repair = None if field.name in unset else REPAIRED.get(field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(args, field.name)
        if repair is not None and value != default and repair.matters(args):
            lines.append(f"{field.name}={value!r} {repair.meaning.format(steps=args.steps_per_rollout)}")
    return lines


def warn_about_repaired_fields(args: Any) -> None:
    """Warn once about all of them."""
    lines = repaired_fields(args)
    if lines:
        text = "\n  ".join(["repaired since TRL 1.12, see docs/migrate.md:", *lines])
        warnings.warn(text, RepairedFieldWarning, stacklevel=3)
