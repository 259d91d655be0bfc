# ruff: noqa: RUF009
"""Our configuration fields as plain dataclasses.

Standard library only: `trl-alpharl --help` and the recipe loader read these fields without importing torch.
`trainers.ppo_config.PPOConfig` is these knobs on top of TRL's `_BaseConfig`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

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


def _knob(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class PPOKnobs:
    """The fields that PPO adds to transformers' `TrainingArguments`. Names and defaults follow TRL 1.12's `PPOConfig`;
    docs/migrate.md lists the few whose default or meaning was repaired."""

    # Optimisation
    learning_rate: float = _knob(3e-6, "Initial learning rate of the optimizer.")
    critic_learning_rate: float | None = _knob(
        None, "Learning rate of the value head and of a critic with its own weights. None: the same as learning_rate."
    )
    num_ppo_epochs: int = _knob(4, "Passes over one rollout.")
    num_mini_batches: int = _knob(1, "Optimizer steps per pass: the rollout is split into this many mini-batches.")
    total_episodes: int | None = _knob(
        None, "Completions to sample over the whole run. None: num_train_epochs times the dataset's length."
    )
    critic_warmup_steps: int = _knob(0, "First optimizer steps that train the critic alone; the policy does not move.")

    # Sampling
    response_length: int = _knob(53, "Most tokens in a completion.")
    temperature: float = _knob(0.7, "Sampling temperature; log-probs and entropies are taken at it too.")
    stop_token: Literal["eos"] | None = _knob(
        "eos",
        "'eos': stop at the tokenizer's eos, at any eos id of the model's generation config and at stop_token_id. "
        "None: stop at stop_token_id only; without one, exactly response_length tokens.",
    )
    stop_token_id: int | None = _knob(None, "One more token id that ends a completion.")
    local_rollout_forward_batch_size: int = _knob(64, "Completions generated at once on each process.")
    num_sample_generations: int = _knob(
        10, "Tables of sample completions printed over the run; needs an eval dataset. 0: none."
    )

    # vLLM
    use_vllm: bool = _knob(False, "Sample rollouts by vLLM. Evaluation and sample tables stay with transformers.")
    vllm_mode: Literal["colocate", "server"] = _knob(
        "colocate", "colocate: an engine in this process, on the same GPU. server: one that runs elsewhere."
    )
    vllm_gpu_memory_utilization: float = _knob(0.3, "colocate: share of the GPU's memory for vLLM.")
    vllm_max_model_length: int | None = _knob(
        None,
        "colocate: most tokens of prompt and completion together. None: the model's own context, as vLLM reads it.",
    )
    vllm_tensor_parallel_size: int = _knob(1, "colocate: processes, a GPU each, that share one engine.")
    vllm_enable_sleep_mode: bool = _knob(
        False, "colocate: free vLLM's memory between rollouts; waking it takes time at each."
    )
    vllm_server_host: str = _knob("0.0.0.0", "server: its host.")
    vllm_server_port: int = _knob(8000, "server: its port.")
    vllm_server_timeout: float = _knob(240.0, "server: seconds to wait until it is up.")
    vllm_group_port: int = _knob(51216, "server: port by which weights are sent; another for each run on a machine.")

    # Reward
    reward_weights: list[float] | None = _knob(None, "Weight of each reward, in order. None: 1 each.")
    missing_eos_penalty: float | None = _knob(
        None, "Subtracted from the score of a completion that no stop token ended."
    )
    whiten_rewards: bool = _knob(False, "Scale token rewards to unit variance before advantages.")
    kl_coef: float = _knob(0.05, "Coefficient of the KL penalty in the token rewards; its start value with kl_target.")
    kl_estimator: Literal["k1", "k2", "k3"] = _knob(
        "k1", "KL estimator: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."
    )
    kl_target: float | None = _knob(
        None, "Adapt kl_coef so that the KL per completion, in nats, stays near this. None: fixed."
    )
    kl_horizon: int = _knob(10_000, "Episodes over which the adaptive kl_coef reacts; smaller is faster.")

    # PPO
    gamma: float = _knob(1.0, "Discount factor.")
    lam: float = _knob(0.95, "GAE lambda of the advantages.")
    lam_critic: float | None = _knob(None, "GAE lambda of the value targets. None: the same as lam.")
    cliprange: float = _knob(0.2, "Clip range of the probability ratio.")
    cliprange_high: float | None = _knob(
        None, "Upper clip range of the ratio (clip-higher). None: the same as cliprange."
    )
    cliprange_value: float = _knob(0.2, "Clip range of the value around its rollout estimate.")
    vf_coef: float = _knob(0.1, "Weight of the value loss.")

    # Roles
    critic: Literal["shared", "adapter"] = _knob(
        "shared",
        "Critic when no value_model is passed. shared: a head on the policy's trunk. adapter: its own LoRA adapter and "
        "head.",
    )
    critic_detach: bool = _knob(False, "With critic=shared: value gradients train the head alone, not the trunk.")
    model_adapter_name: str | None = _knob(None, "Which adapter of a PEFT model is the policy. None: the active one.")
    ref_adapter_name: str | None = _knob(
        None, "Which adapter of a PEFT model is the reference. None: chosen by the trainer."
    )

    # Speed and memory
    lora_top_layers: int | None = _knob(
        None, "The fresh adapter goes on the last so many decoder layers alone. None: where peft_config puts it."
    )
    cache_frozen_layers: bool | None = _knob(
        None,
        "Run the layers below the lowest one that learns once a rollout and keep what they give, hidden size x 2 or 4 "
        "bytes a token, for the reference, the critic and every PPO epoch. None: when there are such layers.",
    )
    fuse_lora: bool = _knob(
        True, "Run a LoRA layer over plain weights as one operation, in the precision of these weights."
    )
    merge_lora_in_rollouts: bool | None = _knob(
        None,
        "Sample from a copy of the adapted layers with the adapter added, when they are not quantized. None: on a GPU, "
        "when the copy takes less than half of its free memory.",
    )

    model_init_kwargs: dict | None = _knob(None, "Arguments of from_pretrained when the model is passed by name.")

    # Read by scripts and by the command line, not by the trainer
    sft_model_path: str | None = _knob(None, "Model to start from when model_name_or_path is not given.")
    reward_model_path: str | None = _knob(None, "Sequence classifier with one label that scores completions.")
    dataset_num_proc: int | None = _knob(None, "Processes that a script uses in its own dataset.map calls.")
    ds3_gather_for_generation: bool = _knob(True, "Accepted for old scripts; DeepSpeed ZeRO-3 is refused.")


Storage = Literal["fp32", "bf16", "fp8", "int8", "8bit", "nf4"]
SubspaceMethod = Literal["power", "rsvd", "svd", "random", "column_sampled", "masked"]


@dataclass
class LowRankKnobs:
    """How gradients are projected on a few directions. `lowrank.config.LowRankConfig` checks these fields; a recipe
    writes them with the prefix `lowrank_`."""

    # Rank
    rank: int = _knob(
        64,
        "Rank of a projected gradient. rank_policy sqrt: the most that the rule may give; energy: where it starts; "
        "tanh: not used.",
    )
    rank_policy: Literal["fixed", "tanh", "energy", "sqrt"] = _knob(
        "fixed",
        "tanh: grows with the steps. energy: each matrix gets the rank that holds a share of its gradient's energy. "
        "sqrt: 0.15 sqrt(hidden size x layers), once.",
    )
    rank_pattern: dict | str | None = _knob(
        None,
        "Ranks by module: {pattern of the parameter's name: rank}, the first that is found wins, rank 0 leaves the "
        "matrix alone; or a preset, 'paper' or 'energy'. With rank_policy fixed.",
    )
    tanh_base: int = _knob(32, "rank_policy tanh: rank at the start.")
    tanh_delta: int = _knob(64, "rank_policy tanh: what the rank grows by in the end.")
    tanh_tau: float = _knob(1000.0, "rank_policy tanh: optimizer steps until three quarters of that growth.")
    energy: float = _knob(0.9, "rank_policy energy: the share of a gradient's squared norm to hold.")
    rank_min: int = _knob(8, "rank_policy energy: the least rank.")
    rank_max: int = _knob(128, "rank_policy energy: the greatest rank.")

    # Subspace
    side: Literal["in", "out", "short", "long"] = _knob(
        "in", "Side of a matrix that is projected: the layer's input or output, the shorter or the longer one."
    )
    refresh: SubspaceMethod | None = _knob(
        None, "How a basis is found. None: power in the optimizer, rsvd in the callback. svd: exact. masked: harmful."
    )
    update_gap: int = _knob(
        50, "Optimizer steps between renewals of a basis, at rollout boundaries, not all matrices at once. 0: never."
    )
    rotate_moments: bool = _knob(True, "Move Adam's moments into a new basis; false leaves them behind (worse).")

    # Update
    update: Literal["adam", "scaled"] = _knob(
        "adam",
        "adam: Adam inside the subspace. scaled: the full gradient, each channel scaled as Adam in the subspace would "
        "(APOLLO); for very low ranks, and the full gradient stays.",
    )
    scale: float = _knob(1.0, "Factor on the update of projected matrices.")
    accumulate_in_subspace: bool | None = _knob(
        None,
        "Project each micro-batch's gradient during backward and drop it, so that full gradients never exist together. "
        "None: yes, unless update is scaled or several processes reduce full gradients.",
    )
    norm_sketch: int = _knob(
        4, "Random columns that estimate the norm of what lies outside the subspace, for clipping."
    )
    small_lora: bool = _knob(False, "Project LoRA factors of rank 64 and less too (worse than a smaller LoRA).")

    # Storage
    basis_storage: Storage = _knob("bf16", "How bases are kept.")
    moment_storage: Storage = _knob(
        "8bit", "How the moments of projected matrices are kept; 8bit is bitsandbytes' form."
    )
    accumulator_storage: Storage = _knob("fp32", "How projected gradients are kept between micro-batches.")
    plain_storage: Storage = _knob("fp32", "How the moments of all other parameters are kept; 8bit suits LoRA factors.")
    stochastic_rounding: bool = _knob(
        True, "Round updates of bf16 weights up or down at random, which keeps small ones."
    )

    # Several processes
    all_reduce: Literal["full", "powersgd", "projected"] = _knob(
        "full",
        "What processes exchange: full gradients, rank-all_reduce_rank approximations with error feedback (PowerSGD), "
        "or projected gradients.",
    )
    all_reduce_rank: int = _knob(16, "all_reduce powersgd: rank.")

    seed: int = _knob(0, "Seed of random bases, sketches and rounding.")


@dataclass
class LowRankSwitch:
    """Whether gradients are projected at all."""

    # Low-rank gradients
    lowrank: Literal["none", "callback", "optimizer"] = _knob(
        "none",
        "callback: each gradient's low-rank approximation, for any optimizer. optimizer: AdamW whose gradients and "
        "state live in subspaces. The fields below set it up.",
    )


def _with_prefix(source: type, prefix: str, base: type) -> type:
    """A dataclass with the fields of another one after those of `base`, their names prefixed."""
    kinds = get_type_hints(source)
    renamed = [
        (prefix + f.name, kinds[f.name], field(default=f.default, metadata=f.metadata))
        for f in dataclasses.fields(source)
    ]
    namespace = {"__module__": __name__, "__doc__": f"`{source.__name__}` with the prefix `{prefix}`."}
    return dataclasses.make_dataclass(f"Prefixed{source.__name__}", renamed, bases=(base,), namespace=namespace)


LOWRANK_PREFIX = "lowrank_"
PrefixedLowRankKnobs = _with_prefix(LowRankKnobs, LOWRANK_PREFIX, LowRankSwitch)
# The classes in whose source a made one's fields stand, and the prefix that they got.
WRITTEN_IN: dict[type, tuple[tuple[type, str], ...]] = {
    PrefixedLowRankKnobs: ((LowRankSwitch, ""), (LowRankKnobs, LOWRANK_PREFIX))
}


@dataclass
class ARPOKnobs:
    """The fields that ARPO adds to PPO's. None: as the preset says; docs/arpo.md has the presets and what each field
    was measured to do. A field that only matters while another is switched on is refused while that one is off."""

    # Preset
    preset: Literal["tuned", "paper", "ppo"] = _knob(
        "tuned", "tuned: what measurements support for reward_kind. paper: the description, literally. ppo: all off."
    )
    reward_kind: Literal["verifiable", "graded", "drifting"] | None = _knob(
        None,
        "What preset tuned is for. verifiable: rewards of 0 or 1. graded: numbers on a steady scale. drifting: numbers "
        "whose scale moves or that have outliers. None: graded.",
    )

    # Reward scaling and shaping
    reward_scaling: Literal["none", "robust", "running", "batch"] | None = _knob(
        None,
        "Scale each reward function's numbers before the weighted sum. robust: averaged median and IQR. running: mean "
        "and deviation of the run. batch: of the rollout. kl_coef and missing_eos_penalty then count in scaled units.",
    )
    reward_scale_decay: float | None = _knob(None, "Weight of the past in the robust averages. None: 0.9.")
    reward_sigma_min: float | None = _knob(
        None, "Smallest scale, in units of the reward. None: 1 for reward_kind verifiable, else 0."
    )
    reward_clip: float | None = _knob(None, "Scaled rewards are clipped to this many scales. None: 3.")
    popart: bool | None = _knob(None, "Let the critic learn in units of the returns' spread (PopArt).")
    popart_decay: float | None = _knob(None, "Weight of the past in PopArt's mean and spread. None: 0.9.")
    shaping_rewards: list[str] | None = _knob(
        None, "Reward functions, by name, that only shape: their weight falls over the run. None: none."
    )
    shaping_schedule: Literal["success", "linear", "cosine"] | None = _knob(
        None, "How it falls: with the success rate, or with the steps. None: success."
    )
    shaping_coef: float | None = _knob(None, "The factor on shaping rewards where it falls from. None: 1.")
    success_threshold: float | None = _knob(
        None,
        "A completion succeeds when its rewards, those that only shape left out, sum to more than this. None: 0.5.",
    )

    # Entropy
    entropy_control: Literal["none", "fixed", "dual", "pi"] | None = _knob(
        None, "Entropy bonus. fixed: by entropy_coef. dual, pi: steered so that the entropy follows a target."
    )
    entropy_form: Literal["loss", "reward", "both"] | None = _knob(
        None, "Where the bonus enters: the policy loss, the token rewards before GAE, or both. None: loss."
    )
    entropy_coef: float | None = _knob(
        None, "Coefficient of the bonus; where it starts when it is steered. None: 0.01."
    )
    entropy_coef_min: float | None = _knob(
        None, "Lowest steered coefficient; below 0 it may penalize entropy above the target. None: 0."
    )
    entropy_coef_max: float | None = _knob(None, "Highest steered coefficient. None: 0.05.")
    entropy_rate: float | None = _knob(None, "Step of the dual, a relative entropy error and a rollout. None: 0.02.")
    entropy_kp: float | None = _knob(None, "Proportional gain of pi. None: 1.")
    entropy_ki: float | None = _knob(None, "Integral gain of pi. None: 0.1.")
    entropy_start: float | None = _knob(None, "Target at the start, as a share of the first entropy. None: 0.8.")
    entropy_end: float | None = _knob(None, "Target at the end of the run, as that share. None: 0.3.")

    # Advantages
    lam_end: float | None = _knob(None, "GAE lambda at the end of the run, on a line from lam. None: no decay.")
    lam_length_scale: float | None = _knob(
        None, "Lambda of each completion, 1 - 1 / (this x its length), for the advantages alone. 0: off. VAPO: 0.05."
    )
    advantage_norm: Literal["batch", "ema"] | None = _knob(
        None, "Whiten advantages by the rollout's moments, or by their moving average. None: batch."
    )
    explained_variance_gate: bool | None = _knob(
        None, "While the critic explains no variance, take advantages over the batch's mean return."
    )

    # Updates
    kl_stop: float | None = _knob(
        None, "From the second PPO epoch on, more than this mean KL (nats a token) ends the policy's steps. 0: off."
    )
    reuse_surge: float | None = _knob(
        None, "End them, too, when the gradient at the head's input exceeds the first epoch's this many times. 0: off."
    )
    positive_nll_coef: float | None = _knob(None, "Weight of the likelihood of completions that succeeded. 0: off.")

    # Exploration
    logit_noise: float | None = _knob(None, "Deviation of normal noise on the logits, one draw a completion. 0: off.")
    epsilon_mix: float | None = _knob(None, "Share of tokens drawn uniformly. 0: off.")
    epsilon_top_p: float | None = _knob(
        None, "Draw those from the most likely tokens that reach this probability. None: 1, the whole vocabulary."
    )
    norm_noise: float | None = _knob(None, "Deviation of normal noise on RMSNorm weights, one draw a rollout. 0: off.")
    norm_noise_end: float | None = _knob(None, "Where norm_noise ends, in ten equal ratios. None: 1e-4.")
    exploration_anneal: float | None = _knob(
        None, "Share of the run after which logit_noise and epsilon_mix have fallen to 0. 0: they stay. None: 1."
    )
    rho_max: float | None = _knob(None, "Largest importance weight of an off-policy token. None: 1.")
    c_max: float | None = _knob(None, "Largest trace coefficient of the V-trace value targets. None: 1.")

    # Replay and curriculum
    replay_ratio: float | None = _knob(None, "Share of replayed completions in a rollout's mini-batches. 0: off.")
    replay_priority: Literal["uniform", "advantage", "reward"] | None = _knob(
        None, "Which episodes are replayed more often. None: uniform."
    )
    replay_size: int | None = _knob(None, "Most episodes that each process keeps. None: 512.")
    replay_max_age: int | None = _knob(None, "Oldest episodes that are replayed, in rollouts. None: 8.")
    curriculum: Literal["none", "success"] | None = _knob(
        None, "success: draw prompts toward success_target by what was learned of each. none: passes over the dataset."
    )
    success_target: float | None = _knob(None, "Success rate that the curriculum draws toward. None: 0.5.")
    curriculum_width: float | None = _knob(None, "How far from it a prompt may be, in success rate. None: 0.25.")
    screening: int | None = _knob(
        None,
        "First completions of each prompt; the second half of the rollout goes to prompts that some of them, not all, "
        "solved. 0: off.",
    )


@dataclass
class ScriptKnobs:
    """What a recipe says beside the trainer's fields: data, rewards, model source."""

    method: Literal["ppo", "arpo"] = _knob("ppo", "The trainer.")
    dataset_name: str | None = _knob(
        None,
        "Hub id, local folder or JSON/JSONL/CSV/Parquet file with a 'prompt' column; 'builtin' is the embedded one.",
    )
    dataset_config: str | None = _knob(None, "Configuration of a hub dataset.")
    dataset_train_split: str = _knob("train", "Split to train on.")
    dataset_test_split: str | None = _knob(None, "Split to evaluate on. None: rows held out from the train split.")
    eval_rows: int = _knob(64, "Rows held out for the before/after score when no test split is named.")
    reward_funcs: list[str] | None = _knob(
        None, "Rewards by name (trl-alpharl rewards lists them), module.function, or classifier path."
    )
    sample_rows: int = _knob(5, "Completions shown in the before/after table.")
