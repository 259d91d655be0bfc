"""Callbacks for any transformers trainer. The only file here that imports transformers."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..functional.subspace import energy_rank, find_basis, project, project_back, square_sum
from ..shapes import projected_dim
from .config import LowRankConfig
from .optimizer import LowRankAdamW
from .param_groups import Planned, describe, plan, refuse_arguments
from .storage import seeded_generator

logger = logging.getLogger(__name__)


class LowRankGradientCallback(TrainerCallback):
    """Replaces the gradient of each chosen matrix by its approximation of low rank, before every optimizer step.

    For any optimizer, with LoRA factors and 4-bit trunks too: `Trainer(..., callbacks=[LowRankGradientCallback()])`.
    A filter of noise; it saves no memory. It acts after clipping: the logged `grad_norm` is the full gradient's. It
    keeps no state, so that a resumed run sees the same bases.

    Logs, since the last log: `lowrank/energy`, `lowrank/rank`, `lowrank/time_s`, `lowrank/skipped` (gradients that were
    not finite and are passed on as they are).

    Raises ValueError when the run uses `LowRankAdamW` too, under DeepSpeed and FSDP, and for fields that only the
    optimizer reads.
    """

    def __init__(self, config: LowRankConfig | None = None) -> None:
        self.config = LowRankConfig() if config is None else config
        self.config.check_for_callback()
        self._planned: list[Planned] | None = None
        self._sums = _Sums()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Choose the matrices and say which."""
        refuse_arguments(args, takes_gradients=False)
        if isinstance(_unwrap(kwargs.get("optimizer")), LowRankAdamW):
            raise ValueError("LowRankGradientCallback and LowRankAdamW are both configured; choose one of them.")
        self._planned = plan(model, self.config)
        logger.warning(describe(self._planned, self.config))

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Approximate the gradients in place."""
        start = time.perf_counter()
        for index, item in enumerate(self._planned):
            if item.rank and item.parameter.grad is not None:
                self._approximate(item, index, state.global_step)
        self._sums.seconds += time.perf_counter() - start

    def _approximate(self, item: Planned, index: int, step: int) -> None:
        gradient = item.parameter.grad
        whole = square_sum(gradient)
        if not whole.isfinite():
            self._sums.skipped += 1
            return
        dim = projected_dim(tuple(gradient.shape), self.config.side, item.in_dim)
        matrix = gradient if dim == 0 else gradient.T
        generator = seeded_generator(gradient.device, self.config.seed, index, step)
        basis, coordinates = self._coordinates(matrix.float(), item, step, generator, whole)
        matrix.copy_(project_back(basis, coordinates))
        self._sums.add(coordinates, whole)

    def _coordinates(
        self, matrix: Tensor, item: Planned, step: int, generator: torch.Generator, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        by_energy = self.config.rank_policy == "energy"
        rank = self.config.rank_max if by_energy else self.config.scheduled_rank(item.rank, step)
        basis = find_basis(self.config.refresh or "rsvd", matrix, min(rank, *matrix.shape), generator)
        coordinates = project(basis, matrix)
        if by_energy:
            enough = energy_rank(coordinates.square().sum(1), whole, self.config.energy)
            if enough is not None:
                rank = max(self.config.rank_min, enough)
                basis, coordinates = basis[:, :rank], coordinates[:rank]
        return basis, coordinates

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what happened since the last log."""
        if logs is not None and "loss" in logs:
            add_to_log(state, logs, self._sums.flush())


class LowRankRelease(TrainerCallback):
    """Lets go of the model's gradients when training ends, so that the next trainer gets them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Take gradients, again after an earlier `train()`."""
        if isinstance(_unwrap(optimizer), LowRankAdamW):
            _unwrap(optimizer).taker.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Leave them alone."""
        if isinstance(_unwrap(optimizer), LowRankAdamW):
            _unwrap(optimizer).taker.release()


class LowRankLogger(LowRankRelease):
    """The companion of `LowRankAdamW` where `optimizer_cls_and_kwargs` brought it in: it logs the optimizer's
    statistics and, as `grad_norm`, the norm of the whole gradient (transformers sees the part that is not projected),
    and lets go of the gradients at the end. `LowRankMixin` needs none of it.

    Raises RuntimeError at the start of training when another optimizer is in use."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """See that the optimizer is in use."""
        if not isinstance(_unwrap(optimizer), LowRankAdamW):
            raise RuntimeError(
                f"LowRankLogger belongs to LowRankAdamW, but the trainer uses {type(_unwrap(optimizer)).__name__}."
            )
        super().on_train_begin(args, state, control, optimizer, **kwargs)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Add the optimizer's view of the last step."""
        optimizer = _unwrap(optimizer)
        if logs is not None and "loss" in logs and isinstance(optimizer, LowRankAdamW):
            add_to_log(state, logs, {"grad_norm": float(optimizer.last_norm), **optimizer.statistics()})


class _Sums:
    """Sums since the last log."""

    def __init__(self) -> None:
        self.energies: list[tuple[Tensor, Tensor]] = []
        self.ranks: list[int] = []
        self.seconds = 0.0
        self.skipped = 0

    def add(self, coordinates: Tensor, whole: Tensor) -> None:
        """One approximation: its coordinates (r, n) and the squared norm of the gradient."""
        self.energies.append((square_sum(coordinates), whole))
        self.ranks.append(len(coordinates))

    def flush(self) -> dict[str, float]:
        """Means by key; starts anew."""
        found: dict[str, float] = {"lowrank/skipped": self.skipped, "lowrank/time_s": self.seconds}
        if self.ranks:
            kept, whole = (float(torch.stack(part).sum()) for part in zip(*self.energies))
            found["lowrank/energy"] = kept / max(whole, 1e-30)
            found["lowrank/rank"] = sum(self.ranks) / len(self.ranks)
        self.__init__()
        return found


def _unwrap(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def add_to_log(state: Any, logs: dict[str, float], more: dict[str, float]) -> None:
    """Into the log that other callbacks see and into the history, which holds a copy made before the callbacks ran."""
    logs.update(more)
    if state.log_history and "loss" in state.log_history[-1]:
        state.log_history[-1].update(more)
