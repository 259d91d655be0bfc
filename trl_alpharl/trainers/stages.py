"""The stages of PPO, in the order in which data flows through them:

sample_prompts -> explore -> reward -> score -> shape_rewards -> estimate_advantages -> (policy_loss + value_loss) for
every chunk of every mini-batch that policy_learns and admit_step let through -> after_update.

`ARPOTrainer` overrides stages and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.utils import logging

from .._trl import is_conversational
from ..functional.advantages import compute_gae, explained_variance_from_moments
from ..functional.kl import per_token_kl
from ..functional.losses import clipped_surrogate_loss, clipped_value_loss
from ..functional.masking import masked_moments, masked_sum, merge_moments, whiten
from ..functional.rewards import combine_rewards, penalize_missing_eos, token_rewards
from ..records import Advantages, Rollout, Scored, TokenChunk, TokenStats
from ..roles.actor_critic import Wanted
from ..roles.prepare import check_positions, first_bad_parameter
from ..roles.saved_bytes import saved_bytes_per_token
from ..rollout.exploration import Exploration
from ..rollout.prompts import prompt_rows, seeded_generator
from ..rollout.sampler import sample
from ..rollout.scoring import ChunkPlan, gather_rows, plan_chunks, score_rollout
from ..shapes import equal_chunk_rows
from .loader import mini_batches, take_rows
from .metrics import MetricSums

logger = logging.get_logger(__name__)


class PPOStages:
    """What happens to a rollout. The trainer that mixes this in holds `model`, `args`, `state`, `sampling`, `engine`,
    `metrics`, `faults`, `kl_controller`, `reward_runner`, `tokenize_prompts`."""

    def sample_prompts(self, index: int) -> list[int]:
        """The dataset rows of rollout `index`, over all processes."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return prompt_rows(len(self.train_dataset), self.args.batch_size, index, seed)

    def local_rows(self, index: int) -> list[int]:
        """Those of them that this process answers."""
        size = self.args.local_batch_size
        return self.sample_prompts(index)[self.args.process_index * size :][:size]

    def explore(self, prompts: list[list[int]], examples: list[dict[str, Any]], index: int) -> Rollout:
        """Completions of the behaviour policy; for PPO the policy itself."""
        return self.draw_completions(prompts, examples, index)

    def rollout(self, index: int | None = None) -> Rollout:
        """Sample the completions of rollout `index`; None: the one that the step counter has reached."""
        start = time.time()
        index = self.state.global_step // self.args.steps_per_rollout if index is None else index
        self._require_finite_weights()
        examples = take_rows(self.train_dataset, self.local_rows(index))
        prompts = self.tokenize_prompts(examples)
        check_positions(self.policy_model, max(map(len, prompts)), self.args.response_length)
        try:
            with self.accelerator.autocast():
                rollout = self.explore(prompts, examples, index)
        except RuntimeError:
            self._require_finite_weights(all_of_them=True)
            raise
        self._collect_s = time.time() - start
        self.metrics.add("time/rollout_s", self._collect_s)
        return rollout

    def score(self, rollout: Rollout) -> Scored:
        """Ask the rewards and, in one pass without gradients, policy, reference and critic."""
        start = time.time()
        scored = self._score(rollout, self.plan(rollout)[0], self.metrics)
        faulty = self._sum_over_processes(torch.tensor(float(not scored.finite), device=scored.scores.device)) > 0
        if faulty and scored.finite:
            scored = replace(scored, finite=False, cause="another process's reward or log-prob")
        self._collect_s += time.time() - start
        self.metrics.add("time/score_s", time.time() - start)
        return scored

    def reward(self, rollout: Rollout, metrics: MetricSums) -> tuple[Tensor, str]:
        """What each reward function says about each row, (B, F) with NaN for no opinion, and what was not finite, if
        anything. Rows whose rewards are known are not asked about again."""
        known = rollout.known_rewards
        asked = rollout if known is None else rollout.head(len(rollout.completion_ids) - len(known))
        prompts, completions, columns = self._texts(asked)
        ids = [row[mask].tolist() for row, mask in zip(asked.completion_ids.cpu(), asked.completion_mask.cpu())]
        extras = {
            "trainer_state": self.state,
            "log_metric": lambda name, value: metrics.add(name, value),
            "log_extra": lambda name, values: None,
        }
        if "prompt" not in rollout.examples[0]:
            extras["prompt_ids"] = [
                row[mask].tolist() for row, mask in zip(asked.prompt_ids.cpu(), asked.prompt_mask.cpu())
            ]
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # a function may leave torch without gradients
            table = self.reward_runner(prompts, completions, ids, columns, extras)
        device = rollout.completion_ids.device
        values = torch.tensor(table.values, dtype=torch.float64, device=device)
        given = torch.tensor(table.given, dtype=torch.bool, device=device)
        bad = given & ~values.isfinite()
        for column, name in enumerate(table.names):
            metrics.add_all(f"reward/{name}", values[:, column], given[:, column] & ~bad[:, column])
        if not given.any():
            logger.warning_once("every reward function returned None for a whole rollout: nothing is trained on it.")
        cause = ", ".join(f"reward {name!r}" for column, name in enumerate(table.names) if bad[:, column].any())
        values = values.masked_fill(~given | bad, float("nan"))
        return values if known is None else torch.cat([values, known.to(device)]), cause

    def combine(self, rewards: Tensor, rollout: Rollout, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores (B,), penalties included, and which rows have one (B,), of rewards (B, F). `factors` (F,) multiply the
        rewards' weights."""
        weights = torch.tensor(self.reward_runner.weights, dtype=torch.float64, device=rewards.device)
        scores, valid = combine_rewards(rewards, weights if factors is None else weights * factors)
        scores = scores.float()
        if self.args.missing_eos_penalty is not None:
            scores = penalize_missing_eos(scores, rollout.finished, self.args.missing_eos_penalty)
        return scores.masked_fill(~valid, 0.0), valid

    def shape_rewards(self, scored: Scored, kl: Tensor, mask: Tensor) -> Tensor:
        """Token rewards (B, C): the KL penalty everywhere, the score on the last token."""
        rewards = token_rewards(scored.scores, kl, mask, self.kl_controller.kl_coef)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, self._merged_moments(rewards, mask), shift_mean=False)
        return rewards

    def estimate_advantages(self, scored: Scored, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Whitened advantages and value targets, (B, C) each."""
        args = self.args
        advantages, returns = compute_gae(rewards, scored.values, mask, args.gamma, args.lam)
        if args.lam_critic is not None:
            returns = compute_gae(rewards, scored.values, mask, args.gamma, args.lam_critic)[1]
        return whiten(advantages, mask, self._merged_moments(advantages, mask)), returns

    def advantages(self, scored: Scored) -> Advantages:
        """Token rewards, advantages and value targets of a scored rollout; its metrics are recorded here."""
        mask = scored.rollout.completion_mask & scored.valid.unsqueeze(1)
        kl = self._kl(scored)
        rewards = self.shape_rewards(scored, kl, mask)
        advantages, returns = self.estimate_advantages(scored, rewards, mask)
        experience = Advantages(scored, mask, rewards, advantages, returns)
        if scored.finite:
            fresh = scored.rollout.fresh
            self._record_rollout(experience.head(fresh), kl[:fresh])
        else:
            self.faults.record(scored.cause, self.args.steps_per_rollout)
        return experience

    def policy_learns(self) -> bool:
        """Whether the next step trains the policy, or the critic alone."""
        return self.state.global_step >= self.args.critic_warmup_steps

    def passes(self) -> tuple[Wanted, ...]:
        """What each chunk of the next step is asked for, a forward and a backward pass each."""
        return self._passes_of_all() if self.policy_learns() else ("value",)

    def _passes_of_all(self) -> tuple[Wanted, ...]:
        """A critic with a trunk of its own comes after the policy, so that what their passes keep never exists
        together; DDP wants one backward for all."""
        apart = self.model.critic != "shared" and self.accelerator.num_processes == 1
        return ("policy", "value") if apart else ("policy+value",)

    def entropy_learns(self) -> bool:
        """Whether `policy_loss` differentiates the entropies: their slopes are then made with the log-probs'."""
        return False

    def policy_loss(
        self,
        stats: TokenStats,
        chunk: TokenChunk,
        experience: Advantages,
        tokens: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, dict]:
        """The clipped surrogate of a chunk over the mini-batch's `tokens`, and sums for the metrics. `weights` (R, C'):
        a factor on each token's loss."""
        args = self.args
        loss = clipped_surrogate_loss(
            stats.per_token_logps,
            gather_rows(chunk, experience.scored.old_per_token_logps),
            gather_rows(chunk, experience.advantages),
            chunk.completion_mask & gather_rows(chunk, experience.mask),
            args.cliprange,
            args.cliprange if args.cliprange_high is None else args.cliprange_high,
            tokens,
            weights,
        )
        return loss.loss, {
            "loss/policy_avg": loss.loss.detach(),
            "policy/approxkl_avg": loss.approx_kl_sum / tokens,
            "policy/clipfrac_avg": loss.clipped_count / tokens,
            "val/ratio": loss.ratio_sum / tokens,
        }

    def value_loss(
        self, stats: TokenStats, chunk: TokenChunk, experience: Advantages, tokens: Tensor
    ) -> tuple[Tensor, dict]:
        """The clipped value loss of a chunk over the mini-batch's `tokens`, and sums for the metrics."""
        loss = clipped_value_loss(
            stats.values,
            gather_rows(chunk, experience.scored.values),
            gather_rows(chunk, experience.returns),
            chunk.completion_mask & gather_rows(chunk, experience.mask),
            self.args.cliprange_value,
            tokens,
        )
        return loss.loss, {"loss/value_avg": loss.loss.detach(), "val/clipfrac_avg": loss.clipped_count / tokens}

    def admit_step(self, totals: dict[str, float]) -> bool:
        """Whether a step may be taken, once its gradients and its metrics are there."""
        return True

    def after_update(self, experience: Advantages) -> None:
        """The rollout is used up: controllers react."""
        scored = experience.scored.head(experience.scored.rollout.fresh)
        if scored.finite:
            kl, rows = self._sum_over_processes(
                torch.stack([self._kl(scored).sum(), scored.valid.sum()]).double()
            ).tolist()
            if rows > 0:
                self.kl_controller.update(kl / rows, self.args.batch_size)

    # Helpers

    def draw_completions(
        self,
        prompts: list[list[int]],
        examples: list[dict[str, Any]],
        index: int,
        draw: int = 1,
        exploration: Exploration | None = None,
    ) -> Rollout:
        """A completion of each prompt, by transformers or by vLLM. `draw` tells the draws of one rollout apart."""
        args = self.args
        process = args.process_index // args.vllm_tensor_parallel_size  # the group decodes as one and must draw as one
        seed = seeded_generator(args.seed, index, process, draw).initial_seed()
        if self.engine is None:
            return sample(self.model, prompts, examples, index, self.sampling, seed, exploration)
        rollout, logps = self.engine.sample(prompts, examples, index, seed)
        self.metrics.add("objective/engine_entropy", -logps, len(prompts))
        return rollout

    def plan(self, rollout: Rollout) -> tuple[ChunkPlan, list[list[list[int]]]]:
        """A rollout's chunk shapes and mini-batches; they follow from its lengths and the seed."""
        if self._plan is None or self._plan[0] is not rollout:
            args = self.args
            if rollout.fresh != args.local_batch_size:
                raise ValueError(
                    f"a rollout of {rollout.fresh} completions; the optimizer steps need local_batch_size = "
                    f"{args.local_batch_size} (per_device_train_batch_size x gradient_accumulation_steps)."
                )
            seed = (args.seed, rollout.index, args.process_index)
            sizes = (args.local_batch_size, args.num_mini_batches, args.num_ppo_epochs)
            batches = mini_batches(*sizes, seed, rollout.replayed)
            rows = equal_chunk_rows(args.local_mini_batch_size, self._rows_at_once(rollout))
            self._plan = (rollout, plan_chunks(rollout, batches, rows, self.args.compile_layers), batches)
        return self._plan[1:]

    def _rows_at_once(self, rollout: Rollout) -> int:
        """The most rows of a chunk: a number by hand, or as many as fit the budget at the rollout's longest row."""
        if self.args.memory_budget_gib is None:
            return self.args.per_device_train_batch_size
        if self._saved_bytes is None:
            with self.accelerator.autocast():
                self._saved_bytes = saved_bytes_per_token(self.model, self._passes_of_all())
        width = max(map(sum, zip(*rollout.lengths()))) + 1
        return max(1, int(self.args.memory_budget_gib * 2**30 / (self._saved_bytes * width)))

    def _score(self, rollout: Rollout, plan: ChunkPlan, metrics: MetricSums) -> Scored:
        rewards, cause = self.reward(rollout, metrics)
        scores, valid = self.combine(rewards, rollout)
        with self.accelerator.autocast():
            stats, reference = score_rollout(self.model, rollout, plan, self.args.temperature)
        for name, tensor in (
            ("log-probs", stats.per_token_logps),
            ("reference log-probs", reference),
            ("values", stats.values),
        ):
            if not tensor.isfinite().all():
                self._require_finite_weights(all_of_them=True)
                cause = ", ".join(filter(None, (cause, name)))
        return Scored(
            rollout=rollout,
            old_per_token_logps=stats.per_token_logps,
            ref_per_token_logps=reference,
            values=stats.values,
            entropies=stats.entropies,
            scores=scores,
            valid=valid,
            finite=not cause,
            cause=cause,
            rewards=rewards,
        )

    def _texts(self, rollout: Rollout) -> tuple[list, list, dict[str, list]]:
        """Prompts and completions as the reward functions see them, and the other columns.

        A text completion is what the whole row's text adds to its prompt's: many tokenizers, given the completion
        alone, drop the space that it begins with.
        """
        tokenizer = self.processing_class
        asked = [row[mask] for row, mask in zip(rollout.prompt_ids, rollout.prompt_mask)]
        answered = [row[mask] for row, mask in zip(rollout.completion_ids, rollout.completion_mask)]
        rows = [asked, answered, [torch.cat(pair) for pair in zip(asked, answered)]]
        texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in rows]
        prompts, completions = [], []
        for example, start, text, whole in zip(rollout.examples, *texts):
            prompt = start if example.get("prompt") is None else example["prompt"]
            chat = is_conversational({"prompt": prompt})
            if not chat and whole.startswith(start):
                text = whole.removeprefix(start)
            prompts.append(prompt)
            completions.append([{"role": "assistant", "content": text}] if chat else text)
        names = [name for name in rollout.examples[0] if name not in ("prompt", "completion", "completion_ids")]
        return prompts, completions, {name: [example[name] for example in rollout.examples] for name in names}

    def _kl(self, scored: Scored) -> Tensor:
        kl = per_token_kl(scored.old_per_token_logps, scored.ref_per_token_logps, self.args.kl_estimator)
        return kl.masked_fill(~(scored.rollout.completion_mask & scored.valid.unsqueeze(1)), 0.0)

    def _record_rollout(self, experience: Advantages, kl: Tensor) -> None:
        scored, mask = experience.scored, experience.mask
        rows = scored.valid.sum()
        penalty = -self.kl_controller.kl_coef * kl.sum()
        entropy = -masked_sum(scored.old_per_token_logps, mask)
        for name, total in (
            ("objective/scores", scored.scores.sum()),
            ("objective/kl", kl.sum()),
            ("objective/entropy", entropy),
            ("objective/non_score_reward", penalty),
            ("objective/rlhf_reward", penalty + scored.scores.sum()),
        ):
            self.metrics.add(name, total, rows)
        lengths, finished = scored.rollout.completion_mask.sum(), scored.rollout.finished.sum()
        self.metrics.add("completions/mean_length", lengths, len(mask))
        self.metrics.add("completions/finished", finished, len(mask))
        self.metrics.add("val/num_eos_tokens", finished, 1 / self.accelerator.num_processes)
        self.metrics.add("objective/kl_coef", self.kl_controller.kl_coef)
        error = self._merged_moments(experience.returns - scored.values, mask)
        targets = self._merged_moments(experience.returns, mask)
        self.metrics.add("val/explained_variance", explained_variance_from_moments(error, targets))

    def _require_finite_weights(self, all_of_them: bool = False) -> None:
        """Raise FloatingPointError naming a parameter that holds a NaN or an infinity."""
        name = first_bad_parameter(self.model, trainable_only=not all_of_them)
        if name is not None:
            raise FloatingPointError(f"parameter {name!r} holds NaN or infinity; load weights that are whole.")

    def _sum_over_processes(self, tensor: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")

    def _union_over_processes(self, names: list[str]) -> list[str]:
        return names if self.accelerator.num_processes == 1 else sorted(set(gather_object(names)))

    def _merged_moments(self, values: Tensor, mask: Tensor) -> Tensor:
        moments = masked_moments(values, mask)
        return merge_moments(self.accelerator.gather(moments.unsqueeze(0)))
