"""ARPO, adaptive reward policy optimization: PPO whose rewards, entropy, lambda, exploration, reuse of samples and
prompts adapt to the run. Each mechanism is a switch of `ARPOConfig`; docs/arpo.md has what each was measured to do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..functional.advantages import (
    compute_gae,
    compute_gae_with_entropy,
    entropy_augmented,
    explained_variance_from_moments,
    mean_baseline_advantages,
)
from ..functional.entropy import EntropyDual, EntropyPI, FixedEntropy
from ..functional.gates import UpdateGate
from ..functional.kl import per_token_kl
from ..functional.lambdas import length_adaptive_lambda, scheduled_lambda
from ..functional.losses import entropy_bonus, positive_nll_loss
from ..functional.masking import masked_sum, whiten
from ..functional.off_policy import importance_weights, vtrace_targets
from ..functional.popart import PopArt, rescale_head
from ..functional.scaling import REWARD_SCALERS, AverageMoments
from ..functional.shaping import SuccessRate, shaping_weight
from ..records import Advantages, Scored, TokenChunk, TokenStats
from ..rollout.exploration import behavior_or_own
from ..rollout.replay import episodes_of
from ..rollout.scoring import gather_rows
from .arpo_config import ARPOConfig
from .arpo_sampling import ARPOSampling
from .ppo_trainer import PPOTrainer

_ADVANTAGE_DECAY = 0.9  # of the moving moments of advantage_norm: ema


class ARPOTrainer(ARPOSampling, PPOTrainer):
    """Adaptive reward policy optimization. Arguments are those of `PPOTrainer`, `args` is an `ARPOConfig`.

    With `preset="ppo"` and nothing else set it is `PPOTrainer`, bit for bit.
    """

    _tag_names = ["trl", "arpo", "trl-alpharl"]
    _name = "ARPO"
    config_class = ARPOConfig

    def _set_up_run(self) -> None:
        super()._set_up_run()
        args = self.args
        self.reward_scaler = None
        if args.reward_scaling != "none":
            kwargs = {"decay": args.reward_scale_decay} if args.reward_scaling == "robust" else {}
            self.reward_scaler = REWARD_SCALERS[args.reward_scaling](args.reward_clip, args.reward_sigma_min, **kwargs)
        self.success_rate = SuccessRate() if args.shaping_schedule == "success" else None
        self.entropy = _entropy_controller(args)
        self.advantage_moments = AverageMoments(_ADVANTAGE_DECAY) if args.advantage_norm == "ema" else None
        self.gate = UpdateGate(args.kl_stop, args.reuse_surge)
        self.model.watch_head_gradient = args.reuse_surge > 0
        self.popart = None
        if args.popart:
            self.model.add_value_bias()
            self.popart = PopArt(args.popart_decay)
        self._set_up_sampling()

    # Stages

    def shape_rewards(self, scored: Scored, kl: Tensor, mask: Tensor) -> Tensor:
        """Token rewards (B, C) of scores whose parts were scaled one by one and weighted by the stage of the run."""
        if not scored.finite or (self.reward_scaler is None and not self._shaping_columns):
            return super().shape_rewards(scored, kl, mask)
        fresh, rewards = scored.rollout.fresh, scored.rewards
        if self.reward_scaler is not None:
            self.reward_scaler.update(self.accelerator.gather(rewards[:fresh].contiguous()))
            rewards = self.reward_scaler.scale(rewards)
            for name, center, spread in zip(
                self.reward_runner.names, self.reward_scaler.center, self.reward_scaler.spread
            ):
                self.metrics.add(f"arpo/reward_center/{name}", center or 0.0)
                self.metrics.add(f"arpo/reward_scale/{name}", spread)
        factors = torch.ones(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
        if self._shaping_columns:
            rate = self.success_rate.rate if self.success_rate is not None else 0.0
            progress = self.progress(scored.rollout.index)
            weight = shaping_weight(self.args.shaping_schedule, self.args.shaping_coef, rate, progress)
            factors[self._shaping_columns] = weight
            self.metrics.add("arpo/shaping_weight", weight)
        scores, valid = self.combine(rewards, scored.rollout, factors)
        self.metrics.add("arpo/shaped_scores", scores[:fresh].sum(), valid[:fresh].sum())
        return super().shape_rewards(replace(scored, scores=scores), kl, mask)

    def estimate_advantages(self, scored: Scored, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Whitened advantages and value targets, (B, C) each, the targets in the units that the critic learns in."""
        args = self.args
        values = scored.values if self.popart is None else self.popart.denormalize(scored.values)
        coef = self.entropy.coef if self._entropy_in("reward") else 0.0
        lam = scheduled = self._lambda(scored.rollout.index)
        if args.lam_length_scale:
            lam = length_adaptive_lambda(mask.sum(1), args.lam_length_scale)
            self.metrics.add("arpo/lam", lam.sum(), len(lam))
        elif args.lam_end is not None:
            self.metrics.add("arpo/lam", scheduled)
        advantages, returns = compute_gae_with_entropy(rewards, values, scored.entropies, mask, args.gamma, lam, coef)
        rewards = entropy_augmented(rewards, scored.entropies, mask, coef)
        lam_critic = scheduled if args.lam_critic is None else args.lam_critic
        if scored.rollout.behavior_logps is not None:
            rho, c = (self._importance(scored, mask, largest) for largest in (args.rho_max, args.c_max))
            returns = vtrace_targets(rewards, values, mask, rho, c, args.gamma, lam_critic)
        elif args.lam_critic is not None or args.lam_length_scale:
            returns = compute_gae(rewards, values, mask, args.gamma, lam_critic)[1]
        if args.explained_variance_gate:
            advantages = self._gated(advantages, rewards, values, mask)
        moments = self._merged_moments(advantages, mask)
        if self.advantage_moments is not None and scored.finite:
            moments = self.advantage_moments.update(moments.cpu()).to(moments.device)
            self.metrics.add("arpo/advantage_scale", self.advantage_moments.variance**0.5)
        if self.popart is not None:
            returns = self.popart.normalize(returns).masked_fill(~mask, 0)
        return whiten(advantages, mask, moments), returns

    def policy_learns(self) -> bool:
        """Not after the gate has closed on this rollout; the critic goes on, on a trunk that it leaves alone."""
        return super().policy_learns() and self.gate.open

    def entropy_learns(self) -> bool:
        """With the entropy bonus in the loss."""
        return self._entropy_in("loss")

    def policy_loss(
        self,
        stats: TokenStats,
        chunk: TokenChunk,
        experience: Advantages,
        tokens: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, dict]:
        """The clipped surrogate, corrected once for who sampled, minus the entropy bonus, plus the successes' NLL."""
        scored, args = experience.scored, self.args
        mask = chunk.completion_mask & gather_rows(chunk, experience.mask)
        old = gather_rows(chunk, scored.old_per_token_logps)
        if scored.rollout.behavior_logps is not None:
            behavior = behavior_or_own(gather_rows(chunk, scored.rollout.behavior_logps), old)
            weights = importance_weights(old, behavior, mask, args.rho_max)
        loss, sums = super().policy_loss(stats, chunk, experience, tokens, weights)
        if weights is not None:
            sums["arpo/importance"] = weights.sum() / tokens
        if self._entropy_in("loss"):
            loss = loss - self.entropy.coef * entropy_bonus(stats.entropies, mask, tokens)
        if args.positive_nll_coef:
            positive = gather_rows(chunk, self.successes(scored.rewards).unsqueeze(1))[:, 0]
            nll = positive_nll_loss(stats.per_token_logps, mask, positive, tokens)
            sums["arpo/positive_nll"] = nll.detach()
            loss = loss + args.positive_nll_coef * nll
        if args.kl_stop:
            moved = per_token_kl(old, stats.per_token_logps.detach(), "k3")  # q - 1 - log q with q = pi / pi_old
            sums["arpo/update_kl"] = masked_sum(moved, mask) / tokens
        if args.reuse_surge:
            sums["arpo/head_gradient_squared"] = self.model.head_gradient  # filled in by the backward pass
        return loss, sums

    def admit_step(self, totals: dict[str, float]) -> bool:
        """Let the gate look at a step of the policy; it may drop the step and end the policy's part of the rollout."""
        args = self.args
        if not (args.kl_stop or args.reuse_surge):
            return True
        learned = "loss/policy_avg" in totals
        self.metrics.add("arpo/policy_steps", float(learned))
        if not learned:
            return True
        epoch = self.state.global_step % args.steps_per_rollout // args.num_mini_batches
        norm = math.sqrt(totals.get("arpo/head_gradient_squared", 0.0))
        admitted = self.gate.admit(epoch, totals.get("arpo/update_kl", 0.0), norm)
        self.metrics.add("arpo/dropped_steps", float(not admitted))
        return admitted

    def after_update(self, experience: Advantages) -> None:
        """The rollout is used up: controllers, the curriculum and the replay buffer take it in."""
        super().after_update(experience)
        self.gate.new_rollout()
        if not experience.scored.finite:
            return
        part = experience.head(experience.scored.rollout.fresh)
        scored = part.scored
        if self.entropy is not None:
            self._steer_entropy(part)
        if self.success_rate is not None:
            wins, rows = self._sum_over_processes(
                torch.stack([self.successes(scored.rewards).sum(), scored.valid.sum()]).double()
            ).tolist()
            if rows:
                self.success_rate.update(wins / rows)
            self.metrics.add("arpo/success_rate", self.success_rate.rate)
        if self.curriculum is not None:
            self.learn_difficulty(scored)
        if self.popart is not None:
            self._rescale_critic(part)
        if self.replay is not None:
            self.replay.add(episodes_of(experience, self.args.replay_priority))

    # What the stages use

    def _entropy_in(self, place: str) -> bool:
        return self.entropy is not None and self.args.entropy_form in (place, "both")

    def _lambda(self, index: int) -> float:
        args = self.args
        return args.lam if args.lam_end is None else scheduled_lambda(args.lam, args.lam_end, self.progress(index))

    def _importance(self, scored: Scored, mask: Tensor, largest: float) -> Tensor:
        behavior = behavior_or_own(scored.rollout.behavior_logps, scored.old_per_token_logps)
        return importance_weights(scored.old_per_token_logps, behavior, mask, largest)

    def _gated(self, advantages: Tensor, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The advantages, or those over the batch's mean return when the critic does not explain the returns."""
        monte_carlo = compute_gae(rewards, values, mask, self.args.gamma, 1.0)[1]
        targets = self._merged_moments(monte_carlo, mask)
        explained = explained_variance_from_moments(self._merged_moments(monte_carlo - values, mask), targets)
        useless = bool(explained <= 0)
        self.metrics.add("arpo/critic_gated", float(useless))
        return mean_baseline_advantages(monte_carlo, mask, targets[1]) if useless else advantages

    def _steer_entropy(self, part: Advantages) -> None:
        total, tokens = self._sum_over_processes(
            torch.stack([masked_sum(part.scored.entropies, part.mask).double(), part.mask.sum().double()])
        ).tolist()
        self.metrics.add("arpo/entropy_coef", self.entropy.coef)
        if tokens:
            self.entropy.update(total / tokens, self.progress(part.scored.rollout.index))
        if self.entropy.target is not None:
            self.metrics.add("arpo/entropy_target", self.entropy.target)

    def _rescale_critic(self, part: Advantages) -> None:
        """Move PopArt's units to the returns of this rollout; what the critic says does not change."""
        returns = self.popart.denormalize(part.returns)
        old, new = self.popart.update(self._merged_moments(returns, part.mask))
        head = self.model.value_head
        with torch.no_grad():
            for parameter, rescaled in zip((head.weight, head.bias), rescale_head(head.weight, head.bias, old, new)):
                parameter.copy_(rescaled)
        self.metrics.add("arpo/popart_mean", self.popart.mean)
        self.metrics.add("arpo/popart_scale", self.popart.spread)

    # What travels in checkpoints

    def _controllers(self) -> dict[str, Any]:
        own = {
            "reward_scaler": self.reward_scaler,
            "success_rate": self.success_rate,
            "entropy": self.entropy,
            "advantage_moments": self.advantage_moments,
            "popart": self.popart,
            "gate": self.gate,
        }
        return {**super()._controllers(), **{name: part for name, part in own.items() if part is not None}}

    def _stores(self) -> dict[str, Any]:
        own = {"replay": self.replay, "curriculum": self.curriculum}
        return {name: part for name, part in own.items() if part is not None}


def _entropy_controller(args: ARPOConfig) -> Any:
    if args.entropy_control == "none":
        return None
    if args.entropy_control == "fixed":
        return FixedEntropy(args.entropy_coef)
    limits, shares = (args.entropy_coef_min, args.entropy_coef_max), (args.entropy_start, args.entropy_end)
    if args.entropy_control == "dual":
        return EntropyDual(args.entropy_coef, args.entropy_rate, limits, *shares)
    return EntropyPI(args.entropy_coef, args.entropy_kp, args.entropy_ki, limits, *shares)
