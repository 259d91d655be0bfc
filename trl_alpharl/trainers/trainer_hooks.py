"""What transformers' `Trainer` asks of the trainer: the loader, the optimizer, what is logged."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import inputs
from .loader import RolloutLoader
from .metrics import peak_memory_bytes


class TrainerHooks:
    """Mixed into `PPOTrainer`, before transformers' `Trainer`."""

    def get_train_dataloader(self) -> RolloutLoader:
        """Mini-batches of rollout after rollout."""
        return RolloutLoader(
            self.train_dataset,
            self.args.batch_size,
            self.args.steps_per_rollout,
            self.args.max_steps,
            step=lambda: self.state.global_step,
            item=lambda step: self.mini_batch(self.collect(step), step),
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """transformers' optimizer; the critic's own parameters at `critic_learning_rate` when it is set."""
        passed = self.optimizer is not None
        optimizer = super().create_optimizer() if model is None else super().create_optimizer(model)
        if not passed and self.args.critic_learning_rate is not None:
            inputs.split_critic_groups(optimizer, self.model.critic_parameters(), self.args.critic_learning_rate)
        return optimizer

    def steps_per_rollout(self) -> int:
        """Bases of low-rank gradients are renewed between rollouts."""
        return self.args.steps_per_rollout

    def get_total_train_batch_size(self, args: Any) -> int:
        """Completions per optimizer step, for the loop's report."""
        return args.mini_batch_size

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: a step's cost is not that of one forward over its inputs."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with our metrics since the last time."""
        if "loss" in logs or "train_loss" in logs:  # the training loop's own, not an evaluation's or a callback's
            logs = {**logs, **self._flush_metrics()}
        super().log(logs, start_time)

    def _flush_metrics(self) -> dict[str, float]:
        means = self.metrics.flush(self._sum_over_processes, self._union_over_processes)
        if not means:
            return {}
        squared = means.pop("val/ratio_squared", None)
        if squared is not None:
            means["val/ratio_var"] = max(0.0, squared - means["val/ratio"] ** 2)
        episode = getattr(self.state, "episode", 0)
        means["episode"] = episode
        means["eps"] = episode / max(time.time() - self._started, 1e-9)
        means["val/skipped_steps"] = self.faults.skipped_steps
        means["memory/peak_bytes"] = peak_memory_bytes(self.args.device)
        if self.model.compiled:
            means["time/compiled_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if self.lr_scheduler is not None:
            means["lr"] = self.lr_scheduler.get_last_lr()[0]
        return means
