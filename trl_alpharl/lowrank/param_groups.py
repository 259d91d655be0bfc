"""Which parameters of a model are projected, at which rank, and why the others are not."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn

from .config import LowRankConfig
from .distributed import refuse_sharded
from .optimizer import LowRankAdamW, is_projected

logger = logging.getLogger(__name__)

SMALL_LORA = 64
_VECTOR, _LORA, _SMALL, _LEFT_OUT = "vectors", "LoRA factors", "matrices", "left out"
_WHY = {
    _VECTOR: "{count} that are no matrices",
    _LORA: "{count} LoRA factors of rank up to 64 (low-rank moments lose there; plain_storage: 8bit saves)",
    _SMALL: "{count} too small for the rank (it saves nothing there)",
    _LEFT_OUT: "{count} with rank 0 in rank_pattern",
}


class Planned(NamedTuple):
    """One trainable parameter. rank 0: not projected, `reason` says why. in_dim: see `shapes.projected_dim`."""

    name: str
    parameter: nn.Parameter
    rank: int
    in_dim: int
    reason: str


def plan(model: nn.Module, config: LowRankConfig) -> list[Planned]:
    """What happens to each trainable parameter of a model, in its order; tied ones once.

    Raises ValueError for sharded or flattened parameters.
    """
    size = _model_size(model)
    in_first = {  # GPT-2's Conv1D holds (in, out), torch's layers (out, in)
        id(module.weight) for module in model.modules() if type(module).__name__ == "Conv1D"
    }
    planned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        refuse_sharded(parameter, name)
        in_dim = 0 if id(parameter) in in_first else 1
        rank = config.start_rank(name, size) if parameter.ndim == 2 else 0
        reason = ""
        if parameter.ndim != 2:
            reason = _VECTOR
        elif rank == 0:
            reason = _LEFT_OUT
        elif not is_projected(parameter, rank, config.side, in_dim):
            reason = _SMALL
        elif not config.small_lora and _lora_rank(name, parameter) in range(1, SMALL_LORA + 1):
            reason = _LORA
        planned.append(Planned(name, parameter, 0 if reason else rank, in_dim, reason))
    return planned


def describe(planned: list[Planned], config: LowRankConfig) -> str:
    """One line: what is projected, and why the rest is not."""
    chosen = [item for item in planned if item.rank]
    ranks = sorted({item.rank for item in chosen})
    count = sum(item.parameter.numel() for item in chosen)
    what = (
        f"{len(chosen)} matrices ({count / 1e6:.1f}M parameters) at rank {', '.join(map(str, ranks))}"
        if chosen
        else "nothing is projected"
    )
    reasons = Counter(item.reason for item in planned if not item.rank)
    rest = "; ".join(_WHY[reason].format(count=count) for reason, count in reasons.items())
    return f"low-rank gradients, side {config.side}: {what}" + (f". Not projected: {rest}." if rest else ".")


def low_rank_groups(
    model: nn.Module,
    config: LowRankConfig,
    weight_decay: float = 0.0,
    decayed: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups of a model for `LowRankAdamW`; logs the one line.

    Args: decayed, names of the parameters with weight decay; None: those of two and more dimensions.
    """
    planned = plan(model, config)
    logger.warning(describe(planned, config))
    groups: dict[tuple[float, int, int], list[nn.Parameter]] = {}
    for item in planned:
        decays = item.parameter.ndim >= 2 if decayed is None else item.name in decayed
        key = (weight_decay if decays else 0.0, item.rank, item.in_dim)
        groups.setdefault(key, []).append(item.parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rank": rank, "in_dim": in_dim}
        for (decay, rank, in_dim), parameters in groups.items()
    ]


def low_rank_optimizer(
    model: nn.Module, args: Any, config: LowRankConfig | None = None
) -> tuple[type[LowRankAdamW], dict[str, Any]]:
    """For `Trainer(..., optimizer_cls_and_kwargs=low_rank_optimizer(model, args, config))`.

    The trainer then clips what it sees, the gradients that are not projected, and the optimizer clips the whole to the
    same `args.max_grad_norm`. Pass `callbacks=[LowRankLogger()]` too: it logs the whole norm and lets go of the model
    when training ends. `LowRankMixin` needs neither.

    Args: args, transformers' TrainingArguments.
    Raises ValueError under fp16, DeepSpeed or FSDP, and for an `all_reduce` that a trainer without the mixin cannot do.
    """
    config = LowRankConfig() if config is None else config
    refuse_arguments(args, config.takes_gradients)
    if config.all_reduce != "full":
        raise ValueError(
            f"all_reduce is {config.all_reduce!r}, but the trainer's own exchange of full gradients would run; "
            "use LowRankMixin."
        )
    return LowRankAdamW, {
        "params": low_rank_groups(model, config, args.weight_decay),
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "config": config,
        "max_grad_norm": args.max_grad_norm or None,
    }


def refuse_arguments(args: Any, takes_gradients: bool) -> None:
    """Raise ValueError for training arguments under which low-rank gradients would train wrong."""
    for refused, reason in (
        (
            takes_gradients and getattr(args, "fp16", False),
            "fp16: its GradScaler cannot unscale gradients that are projected during backward; use bf16, or "
            "accumulate_in_subspace: false",
        ),
        (
            getattr(args, "deepspeed", None) or _launched_with("DEEPSPEED"),
            "deepspeed: it steps inside backward and flattens or shards gradients",
        ),
        (getattr(args, "fsdp", None) or _launched_with("FSDP"), "fsdp: a shard is no matrix to project; use DDP"),
    ):
        if refused:
            raise ValueError(f"low-rank gradients do not work with {reason}.")


def _launched_with(engine: str) -> bool:
    """Whether `accelerate launch` was told to use an engine; training arguments do not show that."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() in ("true", "1", "yes", "on", "y", "t")


def _lora_rank(name: str, parameter: nn.Parameter) -> int:
    """r of a LoRA factor, A (r, in) or B (out, r); 0 for another parameter."""
    kinds = {"A": 0, "B": 1}
    return next(
        (parameter.shape[dim] for kind, dim in kinds.items() if re.search(f"lora_(embedding_)?{kind}\\b", name)), 0
    )


def _model_size(model: nn.Module) -> int | None:
    """Hidden size times layers, from a transformers config."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = [getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers")]
    return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None
