"""The fields of TRL's `ModelConfig` and transformers' `TrainingArguments`, repeated without their imports.

Both classes import torch, which takes seconds; `--help` and the recipe loader read this table instead. The defaults are
those that `PPOConfig` ends up with. tests/test_hf_fields.py holds names, types, choices and defaults against the
installed classes. In a union the first type that fits a written value wins.
"""
# ruff: noqa: RUF009  (_arg is dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def _arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


Interval = Literal["no", "steps", "epoch"]
LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
]


@dataclass
class ModelFields:
    """TRL's `ModelConfig`: which model, in which precision, with which adapter."""

    # Model
    model_name_or_path: str | None = _arg(None, "Hub id or local folder of the model; 'builtin' is the embedded one.")
    model_revision: str = _arg("main", "Branch, tag or commit on the hub.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = _arg("float32", "Type of the loaded weights.")
    attn_implementation: str | None = _arg(
        None, "Attention code, for example sdpa or eager. None: the model's own choice."
    )

    # LoRA
    use_peft: bool = _arg(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = _arg(16, "Rank of the adapter.")
    lora_alpha: int = _arg(32, "The adapter's output is scaled by lora_alpha / lora_r.")
    lora_dropout: float = _arg(0.05, "Dropout on the adapter's input.")
    lora_target_modules: list[str] | None = _arg(
        None, "Names of the adapted layers; all-linear takes every linear one."
    )
    lora_target_parameters: list[str] | None = _arg(None, "Names of adapted parameters that are not layers.")
    lora_modules_to_save: list[str] | None = _arg(None, "Layers trained in full and saved with the adapter.")
    lora_task_type: str = _arg("CAUSAL_LM", "PEFT's task type.")
    use_rslora: bool = _arg(False, "Scale by lora_alpha / sqrt(lora_r) instead.")
    use_dora: bool = _arg(False, "Split each weight into size and direction and adapt both (DoRA).")

    # Quantization
    load_in_8bit: bool = _arg(False, "Load the frozen weights in 8 bit.")
    load_in_4bit: bool = _arg(False, "Load the frozen weights in 4 bit.")
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = _arg("nf4", "Number format of 4-bit weights.")
    use_bnb_nested_quant: bool = _arg(False, "Quantize the 4-bit scales as well; saves about 0.4 bit a weight.")
    bnb_4bit_quant_storage: str | None = _arg(None, "Type in which packed 4-bit weights are stored.")


@dataclass
class TrainingFields:
    """transformers' `TrainingArguments`. Not here: `learning_rate`, a knob of ours; `parallelism_config`, an object."""

    # Length and batch
    output_dir: str | None = _arg(None, "Folder for checkpoints, the final model, curve and summary.")
    per_device_train_batch_size: int = _arg(8, "Completions in memory at once during an update, on each process.")
    gradient_accumulation_steps: int = _arg(1, "A rollout is per_device_train_batch_size times this times processes.")
    num_train_epochs: float = _arg(3.0, "Passes over the dataset when total_episodes and max_steps are not given.")
    max_steps: int = _arg(-1, "Stop after this many optimizer steps. -1: no limit.")
    average_tokens_across_devices: bool = _arg(True, "Count tokens over all processes when averaging a loss.")
    auto_find_batch_size: bool = _arg(False, "Halve the batch when memory runs out.")

    # Optimizer and schedule
    lr_scheduler_type: Scheduler = _arg("linear", "Shape of the learning rate over the run.")
    lr_scheduler_kwargs: dict | str | None = _arg(None, "More arguments of the schedule.")
    warmup_steps: float = _arg(0, "Optimizer steps of rising learning rate; below 1: share of the run.")
    optim: str = _arg("adamw_torch_fused", "Optimizer by its name in transformers.")
    optim_args: str | None = _arg(None, "More arguments of the optimizer, as name=value,name=value.")
    optim_target_modules: str | list[str] | None = _arg(None, "Layers of transformers' own GaLore and APOLLO.")
    weight_decay: float = _arg(0.0, "Weight decay; biases and norms are left out.")
    adam_beta1: float = _arg(0.9, "Adam's decay of the first moment.")
    adam_beta2: float = _arg(0.999, "Adam's decay of the second moment.")
    adam_epsilon: float = _arg(1e-8, "Adam's term against division by zero.")
    max_grad_norm: float = _arg(1.0, "Gradients are clipped to this norm, once a step. 0: not clipped.")
    label_smoothing_factor: float = _arg(0.0, "Label smoothing; PPO has no labels.")

    # Precision, memory, speed
    bf16: bool | None = _arg(None, "Compute in bfloat16. None: where the hardware supports it.")
    fp16: bool = _arg(False, "Compute in float16.")
    bf16_full_eval: bool = _arg(False, "Evaluate with bfloat16 weights.")
    fp16_full_eval: bool = _arg(False, "Evaluate with float16 weights.")
    tf32: bool | None = _arg(None, "TF32 matrix products on Ampere and newer. None: torch's setting.")
    gradient_checkpointing: bool | None = _arg(None, "Recompute activations in the backward pass. None: no.")
    gradient_checkpointing_kwargs: dict | str | None = _arg(None, "Arguments of gradient_checkpointing.")
    activation_checkpointing: bool | None = _arg(None, "Newer name of gradient_checkpointing.")
    activation_checkpointing_kwargs: dict | str | None = _arg(None, "Newer name of gradient_checkpointing_kwargs.")
    torch_compile: bool = _arg(False, "Compile the model.")
    torch_compile_backend: str | None = _arg(None, "Compiler back end; turns torch_compile on.")
    torch_compile_mode: str | None = _arg(None, "Compiler mode; turns torch_compile on.")
    use_liger_kernel: bool = _arg(False, "Replace layers by Liger's kernels.")
    liger_kernel_config: dict | None = _arg(None, "Which Liger kernels.")
    use_cache: bool = _arg(False, "Keep the key-value cache in training passes.")
    neftune_noise_alpha: float | None = _arg(None, "Noise on input embeddings in training.")
    torch_empty_cache_steps: int | None = _arg(
        None, "Empty the device cache every so many steps. Not used by this trainer."
    )
    use_cpu: bool = _arg(False, "Stay on the CPU although there is a GPU.")

    # Logging
    logging_strategy: Interval = _arg("steps", "When to log.")
    logging_steps: float = _arg(10, "Optimizer steps between two logs; below 1: share of the run.")
    logging_first_step: bool = _arg(False, "Log the first step too.")
    logging_nan_inf_filter: bool = _arg(True, "Leave NaN and infinite losses out of the logged mean.")
    log_on_each_node: bool = _arg(True, "Every machine logs, not just the first.")
    log_level: LogLevel = _arg("passive", "How much transformers says.")
    log_level_replica: LogLevel = _arg("warning", "How much the other processes say.")
    disable_tqdm: bool | None = _arg(None, "No progress bar.")
    include_num_input_tokens_seen: Literal["all", "non_padding", "no"] | bool = _arg("no", "Count the tokens seen.")
    skip_memory_metrics: bool = _arg(True, "Leave transformers' own memory report out.")
    report_to: str | list[str] = _arg("none", "Trackers such as trackio or tensorboard; none, or all installed.")
    run_name: str | None = _arg(None, "Name of the run in trackers.")
    project: str = _arg("huggingface", "Project of the run in trackio.")
    trackio_space_id: str | None = _arg(None, "Hub space that shows the trackio run.")
    trackio_bucket_id: str | None = _arg(None, "Hub bucket that stores the trackio run.")
    trackio_static_space_id: bool | str | None = _arg(
        None, "Hub space with a fixed copy of the trackio run; false: none."
    )

    # Evaluation
    eval_strategy: Interval = _arg("no", "When to evaluate.")
    eval_steps: float | None = _arg(None, "Optimizer steps between two evaluations. None: as logging_steps.")
    eval_delay: float = _arg(0, "Steps or epochs before the first evaluation.")
    eval_on_start: bool = _arg(False, "Evaluate before the first step.")
    per_device_eval_batch_size: int = _arg(8, "Completions evaluated at once, on each process.")
    prediction_loss_only: bool = _arg(False, "Keep only the loss of an evaluation.")
    eval_do_concat_batches: bool = _arg(True, "Join the batches of an evaluation.")
    eval_use_gather_object: bool = _arg(False, "Gather nested objects of all processes.")
    eval_accumulation_steps: int | None = _arg(None, "Batches kept on the device before they move to the CPU.")
    include_for_metrics: list[str] | None = _arg(None, "More inputs of compute_metrics.")
    batch_eval_metrics: bool = _arg(False, "Compute evaluation metrics a batch at a time.")

    # Saving and resuming
    save_strategy: Literal["no", "steps", "epoch", "best"] = _arg("steps", "When to save a checkpoint.")
    save_steps: float = _arg(500, "Optimizer steps between two checkpoints; below 1: share of the run.")
    save_total_limit: int | None = _arg(None, "Checkpoints to keep; older ones are deleted.")
    save_only_model: bool = _arg(False, "Save weights without what a resumed run needs.")
    save_on_each_node: bool = _arg(False, "Every machine saves, not just the first.")
    enable_jit_checkpoint: bool = _arg(False, "Save a checkpoint when the machine asks the run to stop.")
    resume_from_checkpoint: bool | str | None = _arg(
        None, "Checkpoint folder to go on from; true: the newest in output_dir."
    )
    ignore_data_skip: bool = _arg(
        False, "A resumed run starts the dataset from its beginning. Not used by this trainer."
    )
    restore_callback_states_from_checkpoint: bool = _arg(False, "A resumed run restores its callbacks too.")
    load_best_model_at_end: bool = _arg(False, "End with the best checkpoint instead of the last one.")
    metric_for_best_model: str | None = _arg(None, "Logged key that says which checkpoint is best.")
    greater_is_better: bool | None = _arg(None, "Whether a higher metric_for_best_model is better.")

    # Hub
    push_to_hub: bool = _arg(False, "Push every saved model to the hub.")
    hub_model_id: str | None = _arg(None, "Repository to push to.")
    hub_token: str | None = _arg(None, "Access token. None: the one of the hub's login command.")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = _arg("every_save", "What to push.")
    hub_private_repo: bool | None = _arg(None, "Create the repository as private.")
    hub_always_push: bool = _arg(False, "Push although the last push still runs.")
    hub_revision: str | None = _arg(None, "Branch to push to.")

    # Seeds and data loading
    seed: int = _arg(42, "Seed of everything random.")
    data_seed: int | None = _arg(None, "Seed of the data order. None: as seed.")
    full_determinism: bool = _arg(False, "Use only deterministic operations; slower.")
    dataloader_drop_last: bool = _arg(False, "Drop a last batch that is not full. Not used by this trainer.")
    dataloader_num_workers: int = _arg(0, "Processes that load data. Not used by this trainer.")
    dataloader_pin_memory: bool = _arg(
        True, "Load into memory that copies to the GPU faster. Not used by this trainer."
    )
    dataloader_persistent_workers: bool = _arg(
        False, "Keep the loading processes between epochs. Not used by this trainer."
    )
    dataloader_prefetch_factor: int | None = _arg(
        None, "Batches that each loading process prepares. Not used by this trainer."
    )
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = _arg(
        None, "How loading processes start. Not used by this trainer."
    )
    dataloader_in_order: bool = _arg(
        True, "Take batches in the order in which they were asked for. Not used by this trainer."
    )
    remove_unused_columns: bool = _arg(True, "Drop dataset columns that nothing reads.")
    label_names: list[str] | None = _arg(None, "Columns that hold labels.")
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = _arg(
        "random", "Order of the training rows."
    )
    length_column_name: str = _arg("length", "Column with precomputed lengths.")

    # Several processes
    ddp_backend: Literal["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"] | None = _arg(
        None, "How processes talk. None: by hardware."
    )
    ddp_timeout: int = _arg(1800, "Seconds that a process waits for the others.")
    ddp_find_unused_parameters: bool | None = _arg(None, "Let processes look for parameters without a gradient.")
    ddp_bucket_cap_mb: int | None = _arg(None, "Size of a gradient bucket, in MB.")
    ddp_broadcast_buffers: bool | None = _arg(None, "Send the first process's buffers to the others.")
    ddp_static_graph: bool | None = _arg(None, "Promise that the same parameters are used in every step.")
    accelerator_config: dict | str | None = _arg(None, "accelerate's settings, or the path of their JSON file.")
    fsdp: str | None = _arg(None, "Shard parameters over processes (FSDP).")
    fsdp_config: dict | str | None = _arg(None, "FSDP's settings, or the path of their JSON file.")
    deepspeed: dict | str | None = _arg(None, "DeepSpeed's settings, or the path of their JSON file.")
    local_rank: int = _arg(-1, "Set by old launchers.")

    # For scripts
    do_train: bool = _arg(False, "Read by scripts, not by the trainer.")
    do_eval: bool = _arg(False, "Read by scripts, not by the trainer.")
    do_predict: bool = _arg(False, "Read by scripts, not by the trainer.")
    debug: str = _arg("", "transformers' debug features, by name.")
