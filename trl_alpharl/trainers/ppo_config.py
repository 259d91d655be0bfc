"""`PPOConfig`: TRL 1.12's fields on today's `TrainingArguments`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers.utils import is_torch_bf16_gpu_available

from .._trl import BaseConfig
from ..knobs import COMPUTED, LOWRANK_PREFIX, OTHER_NAMES, LowRankSwitch, PPOKnobs, PrefixedLowRankKnobs
from ..lowrank.config import LowRankConfig


@dataclass(repr=False)  # TrainingArguments' repr keeps hub_token to itself
class PPOConfig(PPOKnobs, PrefixedLowRankKnobs, BaseConfig):
    """Configuration of `PPOTrainer`.

    One rollout is `batch_size` completions = per_device_train_batch_size x gradient_accumulation_steps x processes.
    It is trained on for `num_ppo_epochs` passes of `num_mini_batches` optimizer steps. `max_steps`, `logging_steps`,
    `save_steps`, `eval_steps`, warm-up and the schedule count optimizer steps.

    Raises TypeError for a size that is computed and ValueError, naming the field, for a value or a combination that
    cannot work.
    """

    # TRL turns both on by default. 1.12's trainer in fact ran without them; recomputing doubles the backward pass.
    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "Recompute activations in the backward pass. None: no."}
    )
    bf16: bool | None = field(default=None, metadata={"help": "Compute in bfloat16. None: if the GPU can."})
    # A string too, for parsers of command lines, which hand JSON over.
    model_init_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained when the model is passed by name."}
    )

    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "Arguments of the chat template, such as enable_thinking; a row's own come first."},
    )

    _VALID_DICT_FIELDS = [
        *BaseConfig._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "chat_template_kwargs",
        "lowrank_rank_pattern",
    ]

    def __new__(cls, *args: Any, **kwargs: Any) -> PPOConfig:
        for name in kwargs:
            if name in COMPUTED:
                raise TypeError(f"{name} is computed from the other sizes and cannot be set; read it as a property.")
            if name in OTHER_NAMES:
                raise TypeError(f"{cls.__name__} has no field {name!r}; here it is called {OTHER_NAMES[name]!r}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.bf16_by_hardware = self.bf16 is None
        if self.bf16_by_hardware:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        self._accumulation: int | None = None
        for source in (PPOKnobs, LowRankSwitch):
            check_choices(self, source)
        check_ranges(self, _RANGES)
        _check_numbers(self)
        _choose_best_metric(self)
        super().__post_init__()
        if self.lr_scheduler_type == "reduce_lr_on_plateau":  # torch's own default takes a rising score for none
            best = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": best, **(self.lr_scheduler_kwargs or {})}
        _check_low_rank(self)
        _check_sizes(self)
        _check_vllm(self)
        _refuse_unsupported(self)

    @property
    def low_rank(self) -> LowRankConfig | None:
        """The `lowrank_*` fields; None while `lowrank` is none."""
        return None if self.lowrank == "none" else LowRankConfig.of(self)

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

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values. transformers blots out every field called `*_token`; ours is no secret."""
        return {**super().to_dict(), "stop_token": self.stop_token}

    def for_trainer(self, num_prompts: int) -> PPOConfig:
        """A copy for the training loop, `self` untouched: one loader item is one optimizer step, so the loop's own
        accumulation is 1; episodes and optimizer steps are filled in from the dataset's length."""
        args = copy.copy(self)
        args._accumulation = self.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.ignore_data_skip = True  # the loader starts at global_step by itself
        args.remove_unused_columns = False
        if args.max_steps > 0:  # wins over episodes, as over num_train_epochs in transformers
            args.total_episodes = math.ceil(args.max_steps / args.steps_per_rollout) * args.batch_size
            return args
        if args.total_episodes is None:
            args.total_episodes = max(1, int(args.num_train_epochs * num_prompts))
        args.max_steps = args.num_total_batches * args.steps_per_rollout
        return args


def _choose_best_metric(config: PPOConfig) -> None:
    """What says which checkpoint is best, or that learning has stalled: the score. transformers would take a loss,
    which no evaluation has."""
    needed = config.load_best_model_at_end or config.save_strategy == "best"
    needed = needed or config.lr_scheduler_type == "reduce_lr_on_plateau"
    if config.metric_for_best_model is None and needed:
        config.metric_for_best_model = "objective/scores"
    if (config.metric_for_best_model or "").removeprefix("eval_") in ("loss", "reward", "rewards"):
        raise ValueError(
            f"metric_for_best_model is {config.metric_for_best_model!r}, which no evaluation here has; "
            "use 'objective/scores', or another key of docs/metrics.md."
        )


def check_choices(config: Any, knobs: type) -> None:
    """Raise ValueError, naming the field, for a value that is not one of a field's choices."""
    hints = get_type_hints(knobs)
    for knob in fields(knobs):
        parts = (hints[knob.name], *get_args(hints[knob.name]))
        choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        allowed = [*choices, None] if type(None) in parts else choices
        value = getattr(config, knob.name)
        if choices and value not in allowed:
            raise ValueError(f"{knob.name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def _check_low_rank(config: PPOConfig) -> None:
    for knob in fields(PrefixedLowRankKnobs):
        changed = knob.name.startswith(LOWRANK_PREFIX) and getattr(config, knob.name) != knob.default
        if changed and config.lowrank == "none":
            raise ValueError(f"{knob.name} is set, but lowrank is 'none'; set lowrank to 'callback' or 'optimizer'.")
    if config.low_rank is not None and config.lowrank == "callback":
        config.low_rank.check_for_callback()


# Fields, their type, what must hold, and how to say it. None passes where it is the default.
Ranges = tuple[tuple[str, Any, Callable[[Any], bool], str], ...]
_RANGES: Ranges = (
    (
        "per_device_train_batch_size gradient_accumulation_steps num_ppo_epochs num_mini_batches total_episodes "
        "response_length local_rollout_forward_batch_size kl_horizon lora_top_layers "
        "vllm_max_model_length vllm_tensor_parallel_size",
        int,
        lambda value: value >= 1,
        "a whole number, at least 1",
    ),
    (
        "critic_warmup_steps num_sample_generations stop_token_id",
        int,
        lambda value: value >= 0,
        "a whole number, 0 or more",
    ),
    (
        "temperature cliprange cliprange_high cliprange_value missing_eos_penalty kl_target vllm_server_timeout",
        (int, float),
        lambda value: value > 0,
        "above 0",
    ),
    ("memory_budget_gib", (int, float), lambda value: value > 0, "above 0"),
    ("kl_coef vf_coef critic_learning_rate max_grad_norm", (int, float), lambda value: value >= 0, "0 or more"),
    ("gamma lam lam_critic", (int, float), lambda value: 0 <= value <= 1, "between 0 and 1"),
    ("vllm_gpu_memory_utilization", (int, float), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("vllm_server_port vllm_group_port", int, lambda value: 0 < value < 65536, "a port, 1 to 65535"),
)


def check_ranges(config: Any, ranges: Ranges) -> None:
    """Raise ValueError, naming the field, for a number of the wrong type or outside its range."""
    defaults = {knob.name: knob.default for knob in fields(config)}
    for names, kind, holds, rule in ranges:
        for name in names.split():
            value = getattr(config, name)
            if value is None and defaults[name] is None:
                continue
            number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
            if not (number and holds(value)):
                raise ValueError(f"{name} is {value!r}; it must be {rule}.")


def _check_numbers(config: PPOConfig) -> None:
    """Fields whose rule fits no range."""
    if config.max_steps == 0:
        raise ValueError("max_steps is 0; it must be at least 1, or -1 to count total_episodes.")
    weights = config.reward_weights
    if weights is None:
        return
    numbers = isinstance(weights, (list, tuple)) and all(
        isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
        for weight in weights
    )
    if not numbers:
        raise ValueError(f"reward_weights is {weights!r}; it must be a list of finite numbers, one a reward.")


def _check_sizes(config: PPOConfig) -> None:
    """What several fields must satisfy together."""
    local = config.local_batch_size
    if local % config.num_mini_batches:
        raise ValueError(
            f"num_mini_batches is {config.num_mini_batches}, which does not divide the rollout of {local} completions "
            "a process (per_device_train_batch_size x gradient_accumulation_steps)."
        )
    if config.compile_layers and config.gradient_checkpointing:  # torch traces no checkpoint with a role's contexts
        raise ValueError("compile_layers and gradient_checkpointing are both on; leave one of them out.")
    if config.kl_target is not None and config.kl_coef == 0:
        raise ValueError("kl_coef is 0, which kl_target cannot steer; start it above 0.")
    if config.kl_target is not None and config.kl_horizon * 5 <= config.batch_size:
        raise ValueError(
            f"kl_horizon is {config.kl_horizon}; it must be above a fifth of the rollout's {config.batch_size} "
            "completions, or one update could take kl_coef to 0."
        )


_READ_BY_MODE = {
    "colocate": "gpu_memory_utilization max_model_length tensor_parallel_size enable_sleep_mode",
    "server": "server_host server_port server_timeout group_port",
}


def _check_vllm(config: PPOConfig) -> None:
    for mode, names in _READ_BY_MODE.items():
        for name in (f"vllm_{name}" for name in names.split()):
            changed = getattr(config, name) != getattr(PPOKnobs, name)
            if changed and not config.use_vllm:
                raise ValueError(f"{name} is set, but use_vllm is false; set it to true.")
            if changed and config.vllm_mode != mode:
                raise ValueError(f"{name} is set, but vllm_mode is {config.vllm_mode!r}; {name} is read with {mode!r}.")
    if config.vllm_mode != PPOKnobs.vllm_mode and not config.use_vllm:
        raise ValueError(f"vllm_mode is {config.vllm_mode!r}, but use_vllm is false; set it to true.")
    if config.world_size % config.vllm_tensor_parallel_size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {config.vllm_tensor_parallel_size}, which does not divide the number of "
            f"processes, {config.world_size}."
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
        (
            config.train_sampling_strategy != "random",
            f"train_sampling_strategy={config.train_sampling_strategy!r}: prompts come in shuffled passes",
        ),
        (config.fp16 and config.device.type == "cpu", "fp16 on a CPU: bf16 or fp32 work there"),
        (config.n_gpu > 1, "several GPUs in one process (DataParallel): start with `accelerate launch`"),
    ):
        if refused:
            raise ValueError(f"not supported: {reason}.")
