"""`LowRankMixin`: any transformers trainer with `LowRankAdamW`, clipping, logging and several processes included."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .callback import LowRankRelease
from .config import LowRankConfig
from .distributed import PowerSGD, is_distributed, refuse_engine
from .optimizer import LowRankAdamW
from .param_groups import low_rank_groups, refuse_arguments


class LowRankMixin:
    """Put it before a trainer class and pass `low_rank`:

        class LowRankSFTTrainer(LowRankMixin, SFTTrainer): ...
        trainer = LowRankSFTTrainer(model, args, ..., low_rank=LowRankConfig(rank=64))

    `max_grad_norm` clips the whole gradient and `grad_norm` logs its norm. Without `low_rank` nothing changes.

    A trainer with its own `training_step` wraps each backward in `gradient_sync` and clips by `_clip_grad_norm`.

    Raises ValueError when another optimizer is configured too, and for fp16, DeepSpeed and FSDP.
    """

    def __init__(self, *args: Any, low_rank: LowRankConfig | None = None, **kwargs: Any) -> None:
        self.low_rank = low_rank
        self._power_sgd: PowerSGD | None = None
        super().__init__(*args, **kwargs)
        if low_rank is None:
            return
        self.add_callback(LowRankRelease)
        refuse_arguments(self.args, low_rank.takes_gradients)
        refuse_engine(self.accelerator.distributed_type.value)
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ValueError("low_rank brings its own optimizer; pass neither optimizers nor optimizer_cls_and_kwargs.")
        default = next(f.default for f in fields(self.args) if f.name == "optim")
        if self.args.optim != default:
            name = getattr(self.args.optim, "value", self.args.optim)
            raise ValueError(f"optim is {name!r}, but low_rank brings its own optimizer; set one of them.")
        for name in ("_clip_grad_norm", "_get_grad_norm"):
            if not hasattr(super(), name):
                raise AttributeError(
                    f"this transformers has no Trainer.{name}, without which nothing would be clipped."
                )

    @property
    def low_rank_optimizer(self) -> LowRankAdamW:
        """The optimizer in use; RuntimeError when another one came in its place."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, LowRankAdamW):
            raise RuntimeError(
                f"low_rank is set, but the trainer uses {type(optimizer).__name__}; create_optimizer was by-passed."
            )
        return optimizer

    def steps_per_rollout(self) -> int:
        """Optimizer steps on one batch of samples; bases are renewed in the last of them only."""
        return 1

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """`LowRankAdamW` with the trainer's numbers."""
        if self.low_rank is None:
            return super().create_optimizer() if model is None else super().create_optimizer(model)
        if self.optimizer is None:
            model, args = self.model if model is None else model, self.args
            decayed = self.get_decay_parameter_names(model)
            self.optimizer = LowRankAdamW(
                low_rank_groups(model, self.low_rank, args.weight_decay, decayed),
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
                config=self.low_rank,
                steps_per_rollout=self.steps_per_rollout(),
            )
        return self.optimizer

    def gradient_sync(self, model: Any, last: bool = True) -> AbstractContextManager:
        """The context of one backward: whether DDP exchanges gradients after it. Projected ones travel later."""
        if self.low_rank is not None:
            projected = self.low_rank.all_reduce == "projected"
            self.low_rank_optimizer.taker.attach()  # released at the end of the last `train()`
            if self.low_rank.all_reduce == "powersgd" and self._power_sgd is None and is_distributed():
                self._power_sgd = PowerSGD(model, self.low_rank.all_reduce_rank)
            last = last and not projected
        return nullcontext() if last else self.accelerator.no_sync(model)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The trainer's, with our exchange between processes."""
        with self.gradient_sync(model):
            return super().training_step(model, *args, **kwargs)

    def gradient_norm(self, model: Any) -> Tensor:
        """The norm of the gradient at hand; nothing is clipped."""
        if self._streams():
            return self.low_rank_optimizer.grad_norm()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def drop_gradients(self, model: Any) -> None:
        """Forget the gradient at hand."""
        model.zero_grad(set_to_none=True)
        if self.low_rank is not None:
            self.low_rank_optimizer.zero_grad()

    def _clip_grad_norm(self, model: Any) -> Tensor:
        if self._streams():
            return self.low_rank_optimizer.clip_grad_norm_(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._streams():
            return self.low_rank_optimizer.grad_norm()
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _streams(self) -> bool:
        return self.low_rank is not None and self.low_rank_optimizer.accumulates

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the optimizer's statistics beside the training loss."""
        if self.low_rank is not None and "loss" in logs:
            logs = {**logs, **self.low_rank_optimizer.statistics()}
            if self._power_sgd is not None:
                logs["lowrank/sent_bytes"] = self._power_sgd.sent_bytes
            elif self.low_rank.all_reduce == "full" and is_distributed():
                logs["lowrank/sent_bytes"] = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        super().log(logs, *args, **kwargs)
