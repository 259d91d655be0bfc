"""Every key that training logs: what it means and its unit. Standard library only.

docs/metrics.md is this table; a test holds it against what a run logs. Means run over valid completion tokens or
valid rows of all processes, padding excluded, and over the optimizer steps (or rollouts) since the last log.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One logged key."""

    meaning: str
    unit: str


METRICS: dict[str, Metric] = {
    "eps": Metric("episodes since the start over seconds since the start of this process", "1/s"),
    "episode": Metric("completions sampled so far, over all processes", "completions"),
    "lr": Metric("learning rate of the next step, of the first parameter group", ""),
    "objective/scores": Metric("mean score of a completion, penalties included", "reward"),
    "objective/kl": Metric(
        "KL to the reference summed over a completion, by kl_estimator, mean over completions", "nats"
    ),
    "objective/entropy": Metric("minus the log-prob of the sampled tokens, summed over a completion, mean", "nats"),
    "objective/engine_entropy": Metric(
        "objective/entropy by the log-probs of the engine that sampled (use_vllm); the two should be equal", "nats"
    ),
    "objective/non_score_reward": Metric("KL penalty summed over a completion, mean over completions", "reward"),
    "objective/rlhf_reward": Metric("objective/scores + objective/non_score_reward", "reward"),
    "objective/kl_coef": Metric("coefficient of the KL penalty", "reward/nat"),
    "policy/approxkl_avg": Metric("half the mean squared log-ratio to the rollout's policy", "nats"),
    "policy/clipfrac_avg": Metric("share of tokens whose policy loss is clipped", ""),
    "policy/entropy_avg": Metric("mean entropy of the next-token distribution", "nats"),
    "loss/policy_avg": Metric("clipped surrogate loss", ""),
    "loss/value_avg": Metric("clipped value loss, before vf_coef", "reward^2"),
    "val/clipfrac_avg": Metric("share of tokens whose value loss is clipped", ""),
    "val/ratio": Metric("mean probability ratio to the rollout's policy", ""),
    "val/ratio_var": Metric("variance of the mini-batches' mean ratios", ""),
    "val/num_eos_tokens": Metric("completions that a stop token ended, a rollout", "completions"),
    "val/explained_variance": Metric("1 - Var(return - value) / Var(return) over a rollout's tokens", ""),
    "val/skipped_steps": Metric("optimizer steps skipped so far because something was not finite", "steps"),
    "reward/{name}/mean": Metric("mean of one reward function over the rows it gave a number for", "reward"),
    "reward/{name}/std": Metric("standard deviation of one reward function over those rows", "reward"),
    "completions/mean_length": Metric("mean completion length, stop token included", "tokens"),
    "completions/finished": Metric("share of completions that a stop token ended", ""),
    "time/rollout_s": Metric("seconds to generate a rollout", "s"),
    "time/score_s": Metric("seconds for rewards and the scoring pass of a rollout", "s"),
    "time/update_s": Metric("seconds in the optimizer steps of a rollout", "s"),
    "response_tokens_per_s": Metric(
        "completion tokens of a rollout over its rollout, score and update seconds", "tokens/s"
    ),
    "time/compiled_graphs": Metric("graphs compiled so far by this process (compile_layers)", "graphs"),
    "memory/peak_bytes": Metric("peak device memory (CUDA) or resident memory of the process (CPU)", "bytes"),
    # ARPO's, each while its mechanism is on
    "arpo/reward_center/{name}": Metric("center that one reward function's numbers are scaled from", "reward"),
    "arpo/reward_scale/{name}": Metric("scale of one reward function's numbers, before reward_sigma_min", "reward"),
    "arpo/shaped_scores": Metric("mean score of a completion after scaling and shaping, penalties included", ""),
    "arpo/shaping_weight": Metric("factor on the rewards that only shape", ""),
    "arpo/success_rate": Metric("moving average of the share of completions that succeed", ""),
    "arpo/popart_mean": Metric("mean of the returns that PopArt's units start from", "reward"),
    "arpo/popart_scale": Metric("spread of the returns that is PopArt's unit", "reward"),
    "arpo/entropy_coef": Metric("coefficient of the entropy bonus in a rollout's updates", "1/nat"),
    "arpo/entropy_target": Metric("entropy that the coefficient steers to", "nats"),
    "arpo/lam": Metric("mean GAE lambda of the advantages", ""),
    "arpo/advantage_scale": Metric("moving standard deviation that advantages are whitened by", ""),
    "arpo/critic_gated": Metric("share of rollouts in which the batch's mean return replaced the critic", ""),
    "arpo/update_kl": Metric("mean q - 1 - log q of a mini-batch, q the ratio to the rollout's policy", "nats"),
    "arpo/head_gradient_squared": Metric("squared norm of the policy loss's gradient at the head's input", ""),
    "arpo/policy_steps": Metric("share of optimizer steps that trained the policy", ""),
    "arpo/dropped_steps": Metric("share of policy steps dropped by the batch-reuse gate", ""),
    "arpo/positive_nll": Metric("negative log-likelihood of completions that succeeded, over all tokens", "nats"),
    "arpo/logit_noise": Metric("deviation of the noise on the logits", ""),
    "arpo/epsilon_mix": Metric("share of uniformly drawn tokens", ""),
    "arpo/norm_noise": Metric("deviation of the noise on RMSNorm weights", ""),
    "arpo/importance": Metric("mean importance weight of a token", ""),
    "arpo/replayed": Metric("replayed completions in a rollout's updates", "completions"),
    "arpo/replay_age": Metric("mean age of replayed completions", "rollouts"),
    "arpo/prompt_success": Metric("mean estimated success rate of the drawn prompts", ""),
    "arpo/screened_prompts": Metric("share of screened prompts that some, not all, first completions solved", ""),
    # Low-rank gradients
    "lowrank/rank": Metric("mean rank of the projected matrices", ""),
    "lowrank/energy": Metric(
        "share of the projected matrices' squared gradient norm inside the subspace; callback: since the last log", ""
    ),
    "lowrank/state_bytes": Metric("bases and moments, of one process", "bytes"),
    "lowrank/skipped_steps": Metric("optimizer steps so far whose gradient was not finite", "steps"),
    "lowrank/sent_bytes": Metric("gradients that one process sent in for the last step", "bytes"),
    "lowrank/skipped": Metric("callback: gradients since the last log that were not finite and passed on", "matrices"),
    "lowrank/time_s": Metric("callback: seconds since the last log", "s"),
    "lowrank/rank1_share": Metric("share of the weights' recent path in its leading direction", ""),
    "lowrank/rank1_r2": Metric("how evenly the weights move along it: R^2 of a straight line in time", ""),
    "lowrank/rank1_alignment": Metric("cosine between it and the latest weights' distance from the start", ""),
    "lowrank/rank1_kept": Metric("extrapolations so far that the held-out check let stand", ""),
    "lowrank/rank1_taken_back": Metric("extrapolations so far that it took back", ""),
    # transformers' own
    "loss": Metric("policy loss + vf_coef x value loss, mean over the steps since the last log of this process", ""),
    "grad_norm": Metric("gradient norm of the last step, before clipping; 0 when it was skipped", ""),
    "learning_rate": Metric("learning rate that the last step used, of the first parameter group", ""),
    "epoch": Metric("completions trained on over the dataset's length", "epochs"),
    "step": Metric("optimizer steps so far", "steps"),
    "train_runtime": Metric("seconds of the whole training call", "s"),
    "train_samples_per_second": Metric("completions in all optimizer steps over train_runtime", "1/s"),
    "train_steps_per_second": Metric("optimizer steps over train_runtime", "1/s"),
    "train_loss": Metric("mean loss over the steps of the whole training call", ""),
    "total_flos": Metric("not estimated: 0", ""),
    "eval_runtime": Metric("seconds of an evaluation", "s"),
    "eval_samples_per_second": Metric("evaluated prompts over eval_runtime", "1/s"),
    "eval_steps_per_second": Metric("evaluated batches over eval_runtime", "1/s"),
}

# Keys, and prefixes of keys, that depend on the clock, the machine or (HF's running `loss`) on where a run was resumed.
NOT_REPRODUCIBLE = (
    "eps",
    "time/",
    "response_tokens_per_s",
    "memory/",
    "lowrank/time_s",
    "loss",
    "train_",
    "total_flos",
)
_EVAL_SPEED = ("_runtime", "_samples_per_second", "_steps_per_second")


def is_reproducible(key: str) -> bool:
    """True when two equal runs, one of them resumed, log the same number under this key."""
    if key.startswith("eval_"):
        return not key.endswith(_EVAL_SPEED)
    return not any(key.startswith(name) if name[-1] in "/_" else key == name for name in NOT_REPRODUCIBLE)


def describe(key: str) -> Metric | None:
    """The table's entry for a logged key such as `reward/sentiment/mean`, `eval_objective/scores` or, of an
    evaluation set with a name, `eval_held_out_objective/scores`."""
    if not key.startswith("eval_"):
        return _entry(key)
    words = key.split("_")
    tails = ["_".join(words[start:]) for start in range(1, len(words))]
    found = (METRICS.get(f"eval_{tail}") or _entry(tail) for tail in tails)
    return next((entry for entry in found if entry is not None), None)


def _entry(key: str) -> Metric | None:
    parts = key.split("/")
    if len(parts) == 3 and parts[0] == "reward":
        key = f"reward/{{name}}/{parts[2]}"
    if len(parts) == 3 and parts[0] == "arpo":
        key = f"arpo/{parts[1]}/{{name}}"
    return METRICS.get(key)
