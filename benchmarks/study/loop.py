"""ARPO over S runs at once. The stages are the trainer's; every formula and controller is the package's own.

What only the trainer has (chunks, processes, checkpoints, roles on one backbone) is left out: the policy and the critic
are two small models whose weights carry the runs on a leading axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trl_alpharl.functional.advantages import (
    compute_gae,
    compute_gae_with_entropy,
    entropy_augmented,
    explained_variance,
    mean_baseline_advantages,
)
from trl_alpharl.functional.entropy import EntropyDual, EntropyPI, FixedEntropy
from trl_alpharl.functional.gates import UpdateGate
from trl_alpharl.functional.kl import per_token_kl
from trl_alpharl.functional.lambdas import length_adaptive_lambda, scheduled_lambda
from trl_alpharl.functional.losses import clipped_surrogate_loss, clipped_value_loss, entropy_bonus, positive_nll_loss
from trl_alpharl.functional.masking import masked_mean, masked_moments, whiten
from trl_alpharl.functional.off_policy import importance_weights, vtrace_targets
from trl_alpharl.functional.popart import PopArt, rescale_head
from trl_alpharl.functional.rewards import combine_rewards, token_rewards
from trl_alpharl.functional.scaling import REWARD_SCALERS, AverageMoments
from trl_alpharl.functional.schedules import AdaptiveKLController, FixedKLController
from trl_alpharl.functional.shaping import SuccessRate, shaping_weight
from trl_alpharl.rollout.curriculum import PromptCurriculum
from trl_alpharl.rollout.prompts import seeded_generator
from trl_alpharl.rollout.replay import Episode, ReplayBuffer
from trl_alpharl.trainers.loader import mini_batches

from .sampling import Batch, Sampling
from .stacked import StackedAdamW, StackedDecoder, stack
from .tasks import EOS, Task

EVALUATED = 64  # prompts, once a rollout


def evaluated(task: Task) -> list[int]:
    """The prompts that every evaluation of a task asks."""
    return torch.randperm(len(task.prompts), generator=seeded_generator(12345))[:EVALUATED].tolist()


@dataclass
class Controllers:
    """The state machines of one run."""

    kl: Any
    scaler: Any = None
    success: Any = None
    entropy: Any = None
    moments: Any = None
    popart: Any = None
    replay: Any = None
    curriculum: Any = None
    gate: UpdateGate = field(default_factory=UpdateGate)


def controllers(args: Any, num_prompts: int) -> Controllers:
    """What `ARPOTrainer` sets up for such a configuration."""
    if args.kl_target is None:
        kl = FixedKLController(args.kl_coef)
    else:
        kl = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    own = Controllers(kl, gate=UpdateGate(args.kl_stop, args.reuse_surge))
    own.success = SuccessRate() if args.shaping_schedule == "success" else None
    if args.reward_scaling != "none":
        extra = {"decay": args.reward_scale_decay} if args.reward_scaling == "robust" else {}
        own.scaler = REWARD_SCALERS[args.reward_scaling](args.reward_clip, args.reward_sigma_min, **extra)
    steered = (args.entropy_coef_min, args.entropy_coef_max), args.entropy_start, args.entropy_end
    if args.entropy_control == "fixed":
        own.entropy = FixedEntropy(args.entropy_coef)
    elif args.entropy_control == "dual":
        own.entropy = EntropyDual(args.entropy_coef, args.entropy_rate, *steered)
    elif args.entropy_control == "pi":
        own.entropy = EntropyPI(args.entropy_coef, args.entropy_kp, args.entropy_ki, *steered)
    own.moments = AverageMoments(0.9) if args.advantage_norm == "ema" else None
    own.popart = PopArt(args.popart_decay) if args.popart else None
    if args.replay_ratio:
        own.replay = ReplayBuffer(args.replay_size, args.replay_max_age, args.replay_priority)
    if args.curriculum == "success":
        own.curriculum = PromptCurriculum(num_prompts, args.success_target, args.curriculum_width)
    return own


class Study(Sampling):
    """S runs of one configuration on one task, from one pre-trained model; `args` is an `ARPOConfig`."""

    def __init__(self, task: Task, args: Any, model: Any, seeds: list[int], rollouts: int) -> None:
        self.task, self.args, self.seeds, self.rollouts = task, args, seeds, rollouts
        self.helpers = args.shaping_rewards or []
        if task.helpers and args.reward_weights:  # as rewards like any other
            self.helpers = list(task.helpers)
        self.prompt_length = len(task.prompts[0])
        self.decoder = StackedDecoder(model)
        self.policy = stack(model, len(seeds), model.lm_head.weight)
        self.reference = {name: weight.detach().clone() for name, weight in self.policy.items()}
        self.critic = stack(model, len(seeds), torch.zeros(1, model.config.hidden_size))
        if args.popart:
            self.critic["head.bias"] = torch.zeros(len(seeds), 1, requires_grad=True)
        self.optimizer = StackedAdamW(
            [self.policy, self.critic], args.learning_rate, (args.adam_beta1, args.adam_beta2), args.max_grad_norm
        )
        self.runs = [controllers(args, len(task.prompts)) for _ in seeds]
        self.step = 0
        self.generator = seeded_generator(*seeds)

    def train(self) -> list[dict[str, Any]]:
        """One row of measurements a run: before the training, then after each rollout."""
        return self._measure(0) + [row for index in range(self.rollouts) for row in self.rollout(index)]

    def rollout(self, index: int) -> list[dict[str, Any]]:
        """Sample, learn, and measure the policy that results."""
        progress = index / self.rollouts
        batch = self._with_replayed(self._collect(index, progress), index)
        experience = self._advantages(batch, progress)
        self._update(batch, experience, index)
        self._after(batch, experience, index, progress)
        return self._measure((index + 1) * self.args.batch_size)

    # Advantages

    def _advantages(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        args = self.args
        with torch.no_grad():
            old, entropies = self._token_stats(self.policy, batch.ids)
            reference = self._token_stats(self.reference, batch.ids)[0]
            said = self._values(batch.ids)
        mu = torch.where(batch.mu.isnan(), old, batch.mu)
        scheduled = args.lam if args.lam_end is None else scheduled_lambda(args.lam, args.lam_end, progress)
        lam_critic = scheduled if args.lam_critic is None else args.lam_critic
        parts: dict[str, list[Tensor]] = {"advantages": [], "returns": [], "kl": []}
        for at, run in enumerate(self.runs):
            mask = batch.mask[at]
            values = said[at] if run.popart is None else run.popart.denormalize(said[at])
            kl = per_token_kl(old[at], reference[at], args.kl_estimator)
            rewards = token_rewards(self._scores(run, batch, at, progress), kl, mask, run.kl.kl_coef)
            if args.whiten_rewards:
                rewards = whiten(rewards, mask, masked_moments(rewards, mask), shift_mean=False)
            coef = run.entropy.coef if run.entropy is not None and args.entropy_form != "loss" else 0.0
            lam = length_adaptive_lambda(mask.sum(1), args.lam_length_scale) if args.lam_length_scale else scheduled
            advantages, _ = compute_gae_with_entropy(rewards, values, entropies[at], mask, args.gamma, lam, coef)
            rewards = entropy_augmented(rewards, entropies[at], mask, coef)
            rho, c = (importance_weights(old[at], mu[at], mask, most or 1.0) for most in (args.rho_max, args.c_max))
            returns = vtrace_targets(rewards, values, mask, rho, c, args.gamma, lam_critic)
            if args.explained_variance_gate:
                goal = compute_gae(rewards, values, mask, args.gamma, 1.0)[1]
                if explained_variance(goal, values, mask) <= 0:
                    advantages = mean_baseline_advantages(goal, mask, masked_mean(goal, mask))
            moments = masked_moments(advantages, mask)
            moments = moments if run.moments is None else run.moments.update(moments)
            parts["kl"].append(kl.masked_fill(~mask, 0))
            parts["advantages"].append(whiten(advantages, mask, moments))
            parts["returns"].append(returns if run.popart is None else run.popart.normalize(returns))
        stacked = {name: torch.stack(tensors) for name, tensors in parts.items()}
        return {**stacked, "old": old, "mu": mu, "entropies": entropies, "values": said}

    def _scores(self, run: Controllers, batch: Batch, at: int, progress: float) -> Tensor:
        args = self.args
        rewards = batch.rewards[at]
        if run.scaler is not None:
            run.scaler.update(rewards[: batch.fresh])
            rewards = run.scaler.scale(rewards)
        weights = torch.tensor(args.reward_weights or [1.0] * rewards.shape[1], dtype=rewards.dtype)
        if args.shaping_rewards:
            rate = run.success.rate if run.success is not None else 0.0
            stage = shaping_weight(args.shaping_schedule, args.shaping_coef, rate, progress)
            weights[-len(args.shaping_rewards) :] *= stage
        return combine_rewards(rewards, weights)[0].float()

    # Updates

    def _update(self, batch: Batch, experience: dict[str, Tensor], index: int) -> None:
        args = self.args
        extra = batch.mask.shape[1] - batch.fresh
        plan = mini_batches(batch.fresh, args.num_mini_batches, args.num_ppo_epochs, (*self.seeds, index), extra)
        for epoch, batches in enumerate(plan):
            for rows in batches:
                self._one_step(batch, experience, rows, epoch)
                self.step += 1

    def _one_step(self, batch: Batch, experience: dict[str, Tensor], rows: list[int], epoch: int) -> None:
        args = self.args
        part = {name: tensor[:, rows] for name, tensor in experience.items()}
        ids, mask = batch.ids[:, rows], batch.mask[:, rows]
        values = self._values(ids)
        warm = self.step < args.critic_warmup_steps
        learns = torch.tensor([run.gate.open and not warm for run in self.runs])
        squares = torch.zeros(len(self.runs)) if args.reuse_surge else None
        logps, entropies = part["old"], part["entropies"]
        if learns.any():
            logps, entropies = self._token_stats(self.policy, ids, squares)
        loss, kls = torch.zeros(()), [0.0] * len(self.runs)
        for at, run in enumerate(self.runs):
            tokens = mask[at].sum()
            loss = (
                loss
                + args.vf_coef
                * clipped_value_loss(
                    values[at], part["values"][at], part["returns"][at], mask[at], args.cliprange_value, tokens
                ).loss
            )
            if not learns[at]:
                continue
            loss = loss + self._policy_loss(run, logps[at], entropies[at], batch.rewards[at, rows], part, at, mask[at])
            moved = per_token_kl(part["old"][at], logps[at].detach(), "k3")
            kls[at] = float(masked_mean(moved, mask[at]))
        loss.backward()
        norms = [0.0] * len(self.runs) if squares is None else squares.sqrt().tolist()
        admitted = torch.tensor(
            [not learns[at] or run.gate.admit(epoch, kls[at], norms[at]) for at, run in enumerate(self.runs)]
        )
        steps = args.get_warmup_steps(self.rollouts * args.steps_per_rollout)
        factor = min(1.0, (self.step + 1) / steps) if steps else 1.0
        self.optimizer.step([learns & admitted, admitted], factor)

    def _policy_loss(
        self, run: Controllers, logps: Tensor, entropies: Tensor, rewards: Tensor, part: dict, at: int, mask: Tensor
    ) -> Tensor:
        args, tokens = self.args, mask.sum()
        high = args.cliprange if args.cliprange_high is None else args.cliprange_high
        weights = importance_weights(part["old"][at], part["mu"][at], mask, args.rho_max or 1.0)
        loss = clipped_surrogate_loss(
            logps, part["old"][at], part["advantages"][at], mask, args.cliprange, high, tokens, weights
        ).loss
        if run.entropy is not None and args.entropy_form != "reward":
            loss = loss - run.entropy.coef * entropy_bonus(entropies, mask, tokens)
        if args.positive_nll_coef:
            loss = loss + args.positive_nll_coef * positive_nll_loss(logps, mask, self._successes(rewards), tokens)
        return loss

    def _after(self, batch: Batch, experience: dict[str, Tensor], index: int, progress: float) -> None:
        fresh = slice(0, batch.fresh)
        for at, run in enumerate(self.runs):
            run.gate.new_rollout()
            mask = batch.mask[at, fresh]
            run.kl.update(float(experience["kl"][at, fresh].sum(1).mean()), batch.fresh)
            if run.success is not None:
                run.success.update(float(self._successes(batch.rewards[at, fresh]).double().mean()))
            if run.entropy is not None:
                run.entropy.update(float(masked_mean(experience["entropies"][at, fresh], mask)), progress)
            if run.curriculum is not None:
                won = self._successes(batch.rewards[at, fresh]).double()
                run.curriculum.record(batch.rows[at, fresh].tolist(), won.tolist())
            if run.popart is not None:
                returns = run.popart.denormalize(experience["returns"][at, fresh])
                old, new = run.popart.update(masked_moments(returns, mask))
                head = (self.critic["head.weight"], self.critic["head.bias"])
                with torch.no_grad():
                    for parameter, rescaled in zip(head, rescale_head(head[0][at], head[1][at], old, new)):
                        parameter[at].copy_(rescaled)
            if run.replay is not None:
                run.replay.add(self._episodes(batch, experience, at, index))

    def _episodes(self, batch: Batch, experience: dict[str, Tensor], at: int, index: int) -> list[Episode]:
        kept, start = batch.mask[at, : batch.fresh].sum(1).tolist(), self.prompt_length
        sizes = masked_mean(experience["advantages"][at].abs(), batch.mask[at], 1)
        by_reward = self.args.replay_priority == "reward"
        return [
            Episode(
                prompt_ids=batch.ids[at, row, :start],
                completion_ids=batch.ids[at, row, start:][:length],
                behavior_logps=experience["mu"][at, row, :length],
                rewards=batch.rewards[at, row],
                finished=bool(batch.ids[at, row, start + length - 1] == EOS),
                priority=float(batch.rewards[at, row].sum() if by_reward else sizes[row]),
                born=index,
            )
            for row, length in enumerate(kept)
        ]

    # Measurements

    def _measure(self, episodes: int) -> list[dict[str, Any]]:
        """Held-out prompts' mean score and KL to the reference, of completions of the policy itself."""
        rows = torch.tensor(evaluated(self.task)).expand(len(self.seeds), -1)
        batch = self._sampled(rows, 1.0, explore=False)
        with torch.no_grad():
            own, entropies = self._token_stats(self.policy, batch.ids)
            kl = (own - self._token_stats(self.reference, batch.ids)[0]).masked_fill(~batch.mask, 0).sum(-1).mean(1)
        scores = self._asked(batch.ids, batch.mask, lambda prompt, answer: [self.task.score(prompt, answer)])
        means = scores.squeeze(-1).mean(1).tolist()
        entropy = [float(masked_mean(one, mask)) for one, mask in zip(entropies, batch.mask)]
        if not all(map(math.isfinite, means)):
            raise FloatingPointError(f"{self.task.name}: a score is not finite after {episodes} episodes")
        return [
            {"seed": seed, "episodes": episodes, "score": score, "kl": float(distance), "entropy": h}
            for seed, score, distance, h in zip(self.seeds, means, kl, entropy)
        ]
