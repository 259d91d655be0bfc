"""`PPOConfig`: TRL 1.12's fields on today's `TrainingArguments`."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers.utils import is_torch_bf16_gpu_available

from .._trl import BaseConfig
from ..knobs import PPOKnobs

# Sizes that 1.12 computed and stored in fields; here they are read-only properties.
COMPUTED = (
    "world_size",
    "num_total_batches",
    "micro_batch_size",
    "local_batch_size",
    "batch_size",
    "local_mini_batch_size",
    "mini_batch_size",
)
# What users of other trainers reach for first.
OTHER_NAMES = {
    "max_completion_length": "response_length",
    "beta": "kl_coef",
    "num_iterations": "num_ppo_epochs",
    "epsilon": "cliprange",
    "epsilon_high": "cliprange_high",
    "ppo_epochs": "num_ppo_epochs",
    "init_kl_coef": "kl_coef",
    "target_kl": "kl_target",
    "horizon": "kl_horizon",
}


@dataclass
class PPOConfig(PPOKnobs, BaseConfig):
    """Configuration of `PPOTrainer`.

    One rollout is `batch_size` completions = per_device_train_batch_size x gradient_accumulation_steps x processes.
    It is trained on for `num_ppo_epochs` passes of `num_mini_batches` optimizer steps. `max_steps`, `logging_steps`,
    `save_steps`, `eval_steps`, warm-up and the schedule count optimizer steps.

    Raises TypeError for a size that is computed and ValueError, naming the field, for a value or a combination that
    cannot work.
    """

    gradient_checkpointing: bool | None = False
    bf16: bool | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> PPOConfig:
        for name in kwargs:
            if name in COMPUTED:
                raise TypeError(f"{name} is computed from the other sizes and cannot be set; read it as a property.")
            if name in OTHER_NAMES:
                raise TypeError(f"{cls.__name__} has no field {name!r}; here it is called {OTHER_NAMES[name]!r}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        _check_choices(self)
        _check_ranges(self)
        super().__post_init__()
        self._accumulation: int | None = None
        _refuse_unsupported(self)

    # 1.12's sizes

    @property
    def local_batch_size(self) -> int:
        """Completions of a rollout on one process."""
        return self.per_device_train_batch_size * (self._accumulation or self.gradient_accumulation_steps)

    @property
    def batch_size(self) -> int:
        """Completions of a rollout over all processes."""
        return self.local_batch_size * self.world_size

    @property
    def micro_batch_size(self) -> int:
        """Completions in memory at once over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def local_mini_batch_size(self) -> int:
        """Completions of an optimizer step on one process."""
        return self.local_batch_size // self.num_mini_batches

    @property
    def mini_batch_size(self) -> int:
        """Completions of an optimizer step over all processes."""
        return self.batch_size // self.num_mini_batches

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that one rollout gives."""
        return self.num_ppo_epochs * self.num_mini_batches

    @property
    def num_total_batches(self) -> int | None:
        """Rollouts of the whole run; None until `total_episodes` is known (the trainer sets it from the dataset)."""
        return None if self.total_episodes is None else math.ceil(self.total_episodes / self.batch_size)

    def for_trainer(self, num_prompts: int) -> PPOConfig:
        """A copy for the training loop, `self` untouched: one loader item is one optimizer step, so the loop's own
        accumulation is 1; episodes and optimizer steps are filled in from the dataset's length."""
        args = copy.copy(self)
        args._accumulation = self.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.ignore_data_skip = True  # the loader starts at global_step by itself
        args.remove_unused_columns = False
        if args.total_episodes is None:
            args.total_episodes = max(1, int(args.num_train_epochs * num_prompts))
        if args.max_steps <= 0:
            args.max_steps = args.num_total_batches * args.steps_per_rollout
        return args


def _check_choices(config: PPOConfig) -> None:
    hints = get_type_hints(PPOKnobs)
    for field in fields(PPOKnobs):
        choices: tuple[Any, ...] = ()
        for part in (hints[field.name], *get_args(hints[field.name])):
            if get_origin(part) is Literal:
                choices = get_args(part)
        value = getattr(config, field.name)
        if choices and value is not None and value not in choices:
            raise ValueError(f"{field.name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.")


def _check_ranges(config: PPOConfig) -> None:
    at_least_one = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_ppo_epochs",
        "num_mini_batches",
        "total_episodes",
        "response_length",
        "local_rollout_forward_batch_size",
        "kl_horizon",
    )
    positive = ("temperature", "cliprange", "cliprange_high", "cliprange_value", "missing_eos_penalty", "kl_target")
    not_negative = ("kl_coef", "vf_coef", "critic_warmup_steps", "num_sample_generations", "critic_learning_rate")
    for names, holds, rule in (
        (at_least_one, lambda value: value >= 1, "at least 1"),
        (positive, lambda value: value > 0, "above 0"),
        (not_negative, lambda value: value >= 0, "0 or more"),
        (("gamma", "lam", "lam_critic"), lambda value: 0 <= value <= 1, "between 0 and 1"),
    ):
        for name in names:
            value = getattr(config, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
                raise ValueError(f"{name} is {value!r}; it must be {rule}.")
    local = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if local % config.num_mini_batches:
        raise ValueError(
            f"num_mini_batches is {config.num_mini_batches}, which does not divide the rollout of {local} completions "
            "a process (per_device_train_batch_size x gradient_accumulation_steps)."
        )


def _refuse_unsupported(config: PPOConfig) -> None:
    kwargs = config.gradient_checkpointing_kwargs or {}
    for refused, reason in (
        (config.auto_find_batch_size, "auto_find_batch_size: a rollout's size cannot change while it is trained on"),
        (config.deepspeed, "deepspeed: it steps inside backward, which a mini-batch of several backwards breaks"),
        (config.fsdp, "fsdp: untested with several roles on one backbone"),
        (
            getattr(config, "parallelism_config", None),
            "parallelism_config: context and tensor parallelism are untested",
        ),
        (config.use_liger_kernel, "use_liger_kernel: it replaces the head, whose fp32 chunks PPO needs"),
        (config.label_smoothing_factor, "label_smoothing_factor: there are no labels"),
        (config.neftune_noise_alpha, "neftune_noise_alpha: noise in training alone would break the probability ratio"),
        (isinstance(kwargs, dict) and kwargs.get("use_reentrant"), "gradient_checkpointing_kwargs.use_reentrant: true"),
        (config.n_gpu > 1, "several GPUs in one process (DataParallel): start with `accelerate launch`"),
    ):
        if refused:
            raise ValueError(f"not supported: {reason}.")
