"""One line for each field whose meaning differs from TRL 1.12's, when a script sets it."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, fields
from typing import Any

REPAIRED = {
    "num_mini_batches": "is the number of optimizer steps per PPO epoch (TRL 1.12 stepped once per micro-batch)",
    "max_grad_norm": "clips the gradient of every step (TRL 1.12 never clipped)",
    "bf16": "is honoured (TRL 1.12 ignored it)",
    "gradient_checkpointing": "is honoured for policy and critic, and defaults to False (TRL 1.12: no effect)",
    "stop_token": "defaults to 'eos': the tokenizer's eos, the generation config's and stop_token_id "
    "(TRL 1.12's default None never stopped); None keeps that meaning",
    "stop_token_id": "is added to the eos tokens unless stop_token is None (TRL 1.12 took one or the other)",
    "kl_estimator": "also takes 'k2'",
    "logging_steps": "counts optimizer steps (TRL 1.12 logged every rollout)",
    "save_steps": "counts optimizer steps (TRL 1.12 counted rollouts)",
    "eval_steps": "counts optimizer steps (TRL 1.12 never evaluated)",
    "warmup_steps": "counts optimizer steps, as the schedule does (TRL 1.12 counted rollouts)",
    "max_steps": "is the number of optimizer steps (TRL 1.12 counted rollouts)",
    "local_rollout_forward_batch_size": "is the number of completions generated at once; scoring runs in the chunks of "
    "training (TRL 1.12 used it for both)",
    "num_sample_generations": "prints that many tables, at the same distances; 0 prints none",
}


def warn_about_repaired_fields(args: Any) -> None:
    """Warn, once a process and field, about fields that are set and that changed their meaning since TRL 1.12."""
    for field in fields(args):
        if field.name not in REPAIRED:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name == "bf16":
            default = args.bf16 if not args.bf16 else default
        if getattr(args, field.name) != default:
            warnings.warn(
                f"{field.name}={getattr(args, field.name)!r} {REPAIRED[field.name]}. See docs/migrate.md.",
                UserWarning,
                stacklevel=3,
            )
