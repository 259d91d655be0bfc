# ruff: noqa: RUF009
"""PPO's fields, and names that are none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .field import knob

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
class PPOKnobs:
    """The fields that PPO adds to transformers' `TrainingArguments`. Names and defaults follow TRL 1.12's `PPOConfig`;
    docs/migrate.md lists the few whose default or meaning was repaired."""

    # Optimisation
    learning_rate: float = knob(3e-6, "Initial learning rate of the optimizer.")
    critic_learning_rate: float | None = knob(
        None, "Learning rate of the value head and of a critic with its own weights. None: the same as learning_rate."
    )
    num_ppo_epochs: int = knob(4, "Passes over one rollout.")
    num_mini_batches: int = knob(1, "Optimizer steps per pass: the rollout is split into this many mini-batches.")
    total_episodes: int | None = knob(
        None, "Completions to sample over the whole run. None: num_train_epochs times the dataset's length."
    )
    critic_warmup_steps: int = knob(0, "First optimizer steps that train the critic alone; the policy does not move.")

    # Sampling
    response_length: int = knob(53, "Most tokens in a completion.")
    temperature: float = knob(0.7, "Sampling temperature; log-probs and entropies are taken at it too.")
    stop_token: Literal["eos"] | None = knob(
        "eos",
        "'eos': stop at the tokenizer's eos, at any eos id of the model's generation config and at stop_token_id. "
        "None: stop at stop_token_id only; without one, exactly response_length tokens.",
    )
    stop_token_id: int | None = knob(None, "One more token id that ends a completion.")
    local_rollout_forward_batch_size: int = knob(64, "Completions generated at once on each process.")
    num_sample_generations: int = knob(
        10, "Tables of sample completions printed over the run; needs an eval dataset. 0: none."
    )

    # vLLM
    use_vllm: bool = knob(False, "Sample rollouts by vLLM. Evaluation and sample tables stay with transformers.")
    vllm_mode: Literal["colocate", "server"] = knob(
        "colocate", "colocate: an engine in this process, on the same GPU. server: one that runs elsewhere."
    )
    vllm_gpu_memory_utilization: float = knob(0.3, "colocate: share of the GPU's memory for vLLM.")
    vllm_max_model_length: int | None = knob(
        None,
        "colocate: most tokens of prompt and completion together. None: the model's own context, as vLLM reads it.",
    )
    vllm_tensor_parallel_size: int = knob(1, "colocate: processes, a GPU each, that share one engine.")
    vllm_enable_sleep_mode: bool = knob(
        False, "colocate: free vLLM's memory between rollouts; waking it takes time at each."
    )
    vllm_server_host: str = knob("0.0.0.0", "server: its host.")
    vllm_server_port: int = knob(8000, "server: its port.")
    vllm_server_timeout: float = knob(240.0, "server: seconds to wait until it is up.")
    vllm_group_port: int = knob(51216, "server: port by which weights are sent; another for each run on a machine.")

    # Reward
    reward_weights: list[float] | None = knob(None, "Weight of each reward, in order. None: 1 each.")
    missing_eos_penalty: float | None = knob(
        None, "Subtracted from the score of a completion that no stop token ended."
    )
    whiten_rewards: bool = knob(False, "Scale token rewards to unit variance before advantages.")
    kl_coef: float = knob(0.05, "Coefficient of the KL penalty in the token rewards; its start value with kl_target.")
    kl_estimator: Literal["k1", "k2", "k3"] = knob(
        "k1", "KL estimator: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."
    )
    kl_target: float | None = knob(
        None, "Adapt kl_coef so that the KL per completion, in nats, stays near this. None: fixed."
    )
    kl_horizon: int = knob(10_000, "Episodes over which the adaptive kl_coef reacts; smaller is faster.")

    # PPO
    gamma: float = knob(1.0, "Discount factor.")
    lam: float = knob(0.95, "GAE lambda of the advantages.")
    lam_critic: float | None = knob(None, "GAE lambda of the value targets. None: the same as lam.")
    cliprange: float = knob(0.2, "Clip range of the probability ratio.")
    cliprange_high: float | None = knob(
        None, "Upper clip range of the ratio (clip-higher). None: the same as cliprange."
    )
    cliprange_value: float = knob(0.2, "Clip range of the value around its rollout estimate.")
    vf_coef: float = knob(0.1, "Weight of the value loss.")

    # Roles
    critic: Literal["shared", "adapter"] = knob(
        "shared",
        "Critic when no value_model is passed. shared: a head on the policy's trunk. adapter: its own LoRA adapter and "
        "head.",
    )
    critic_detach: bool = knob(False, "With critic=shared: value gradients train the head alone, not the trunk.")
    model_adapter_name: str | None = knob(None, "Which adapter of a PEFT model is the policy. None: the active one.")
    ref_adapter_name: str | None = knob(
        None, "Which adapter of a PEFT model is the reference. None: chosen by the trainer."
    )

    # Speed and memory
    lora_top_layers: int | None = knob(
        None, "The fresh adapter goes on the last so many decoder layers alone. None: where peft_config puts it."
    )
    cache_frozen_layers: bool | None = knob(
        None,
        "Run the layers below the lowest one that learns once a rollout and keep what they give, hidden size x 2 or 4 "
        "bytes a token, for the reference, the critic and every PPO epoch. None: when there are such layers.",
    )
    fuse_lora: bool = knob(
        True, "Run a LoRA layer over plain weights as one operation, in the precision of these weights."
    )
    fuse_norms: bool = knob(
        True, "Run an RMSNorm layer that does not learn as one operation that keeps its input alone, in its precision."
    )
    merge_lora_in_rollouts: bool | None = knob(
        None,
        "Sample from a copy of the adapted layers with the adapter added, when they are not quantized. None: yes; "
        "on a GPU, when the copy takes less than half of its free memory.",
    )
    drop_finished_rows: bool = knob(
        True, "Whenever half of the completions of a batch have ended, sample the others in a smaller one."
    )
    compile_layers: bool = knob(
        False, "Compile decoder layers for scoring and training; minutes at the start, then some percent of each step."
    )
    memory_budget_gib: float | None = knob(
        None,
        "Rows that run at once in scoring and training: as many as keep what a backward pass needs within this. None: "
        "per_device_train_batch_size.",
    )

    model_init_kwargs: dict | None = knob(None, "Arguments of from_pretrained when the model is passed by name.")
    chat_template_kwargs: dict | None = knob(
        None, "Arguments of the chat template, such as enable_thinking; a row's own come first."
    )

    # Read by scripts and by the command line, not by the trainer
    sft_model_path: str | None = knob(None, "Model to start from when model_name_or_path is not given.")
    reward_model_path: str | None = knob(None, "Sequence classifier with one label that scores completions.")
    dataset_num_proc: int | None = knob(None, "Processes that a script uses in its own dataset.map calls.")
    ds3_gather_for_generation: bool = knob(True, "Accepted for old scripts; DeepSpeed ZeRO-3 is refused.")
