# ruff: noqa: RUF009
"""ARPO's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .field import knob


@dataclass
class ARPOKnobs:
    """The fields that ARPO adds to PPO's. None: as the preset says; docs/arpo.md has the presets and what each field
    was measured to do. A field that only matters while another is switched on is refused while that one is off."""

    # Preset
    preset: Literal["tuned", "paper", "ppo"] = knob(
        "tuned", "tuned: what measurements support for reward_kind. paper: the description, literally. ppo: all off."
    )
    reward_kind: Literal["verifiable", "graded", "drifting"] | None = knob(
        None,
        "What preset tuned is for. verifiable: rewards of 0 or 1. graded: numbers on a steady scale, some 1 "
        "apart. drifting: numbers whose scale moves or is far from 1, or that have outliers. None: graded.",
    )

    # Reward scaling and shaping
    reward_scaling: Literal["none", "robust", "running", "batch"] | None = knob(
        None,
        "Scale each reward function's numbers before the weighted sum. robust: averaged median and IQR. running: mean "
        "and deviation of the run. batch: of the rollout. kl_coef and missing_eos_penalty then count in scaled units.",
    )
    reward_scale_decay: float | None = knob(None, "Weight of the past in the robust averages. None: 0.9.")
    reward_sigma_min: float | None = knob(
        None, "Smallest scale, in units of the reward. None: 1 for reward_kind verifiable, else 0."
    )
    reward_clip: float | None = knob(None, "Scaled rewards are clipped to this many scales. None: 3.")
    popart: bool | None = knob(None, "Let the critic learn in units of the returns' spread (PopArt).")
    popart_decay: float | None = knob(None, "Weight of the past in PopArt's mean and spread. None: 0.9.")
    shaping_rewards: list[str] | None = knob(
        None, "Reward functions, by name, that only shape: their weight falls over the run. None: none."
    )
    shaping_schedule: Literal["success", "linear", "cosine"] | None = knob(
        None, "How it falls: with the success rate, or with the steps. None: success."
    )
    shaping_coef: float | None = knob(None, "The factor on shaping rewards where it falls from. None: 1.")
    success_threshold: float | None = knob(
        None,
        "A completion succeeds when its rewards, those that only shape left out, sum to more than this. None: 0.5.",
    )

    # Entropy
    entropy_control: Literal["none", "fixed", "dual", "pi"] | None = knob(
        None, "Entropy bonus. fixed: by entropy_coef. dual, pi: steered so that the entropy follows a target."
    )
    entropy_form: Literal["loss", "reward", "both"] | None = knob(
        None, "Where the bonus enters: the policy loss, the token rewards before GAE, or both. None: loss."
    )
    entropy_coef: float | None = knob(None, "Coefficient of the bonus; where it starts when it is steered. None: 0.01.")
    entropy_coef_min: float | None = knob(
        None, "Lowest steered coefficient; below 0 it may penalize entropy above the target. None: 0."
    )
    entropy_coef_max: float | None = knob(None, "Highest steered coefficient. None: 0.05.")
    entropy_rate: float | None = knob(None, "Step of the dual, a relative entropy error and a rollout. None: 0.02.")
    entropy_kp: float | None = knob(None, "Proportional gain of pi. None: 1.")
    entropy_ki: float | None = knob(None, "Integral gain of pi. None: 0.1.")
    entropy_start: float | None = knob(None, "Target at the start, as a share of the first entropy. None: 0.8.")
    entropy_end: float | None = knob(None, "Target at the end of the run, as that share. None: 0.3.")

    # Advantages
    lam_end: float | None = knob(None, "GAE lambda at the end of the run, on a line from lam. None: no decay.")
    lam_length_scale: float | None = knob(
        None, "Lambda of each completion, 1 - 1 / (this x its length), for the advantages alone. 0: off. VAPO: 0.05."
    )
    advantage_norm: Literal["batch", "ema"] | None = knob(
        None, "Whiten advantages by the rollout's moments, or by their moving average. None: batch."
    )
    explained_variance_gate: bool | None = knob(
        None, "While the critic explains no variance, take advantages over the batch's mean return."
    )

    # Updates
    kl_stop: float | None = knob(
        None, "From the second PPO epoch on, more than this mean KL (nats a token) ends the policy's steps. 0: off."
    )
    reuse_surge: float | None = knob(
        None, "End them, too, when the gradient at the head's input exceeds the first epoch's this many times. 0: off."
    )
    positive_nll_coef: float | None = knob(None, "Weight of the likelihood of completions that succeeded. 0: off.")

    # Exploration
    logit_noise: float | None = knob(None, "Deviation of normal noise on the logits, one draw a completion. 0: off.")
    epsilon_mix: float | None = knob(None, "Share of tokens drawn uniformly. 0: off.")
    epsilon_top_p: float | None = knob(
        None, "Draw those from the most likely tokens that reach this probability. None: 1, the whole vocabulary."
    )
    norm_noise: float | None = knob(None, "Deviation of normal noise on RMSNorm weights, one draw a rollout. 0: off.")
    norm_noise_end: float | None = knob(None, "Where norm_noise ends, in ten equal ratios. None: 1e-4.")
    exploration_anneal: float | None = knob(
        None, "Share of the run after which logit_noise and epsilon_mix have fallen to 0. 0: they stay. None: 1."
    )
    rho_max: float | None = knob(None, "Largest importance weight of an off-policy token. None: 1.")
    c_max: float | None = knob(None, "Largest trace coefficient of the V-trace value targets. None: 1.")

    # Replay and curriculum
    replay_ratio: float | None = knob(None, "Share of replayed completions in a rollout's mini-batches. 0: off.")
    replay_priority: Literal["uniform", "advantage", "reward"] | None = knob(
        None, "Which episodes are replayed more often. None: uniform."
    )
    replay_size: int | None = knob(None, "Most episodes that each process keeps. None: 512.")
    replay_max_age: int | None = knob(None, "Oldest episodes that are replayed, in rollouts. None: 8.")
    curriculum: Literal["none", "success"] | None = knob(
        None, "success: draw prompts toward success_target by what was learned of each. none: passes over the dataset."
    )
    success_target: float | None = knob(None, "Success rate that the curriculum draws toward. None: 0.5.")
    curriculum_width: float | None = knob(None, "How far from it a prompt may be, in success rate. None: 0.25.")
    screening: int | None = knob(
        None,
        "First completions of each prompt; the second half of the rollout goes to prompts that some of them, not all, "
        "solved. 0: off.",
    )
