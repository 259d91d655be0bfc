"""PPO on transformers' training loop. The stages, in order:

sample_prompts -> explore -> reward -> score -> shape_rewards -> estimate_advantages -> (policy_loss + value_loss) x
mini-batches x epochs -> after_update.
"""

from __future__ import annotations

import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from accelerate.utils import gather_object
from transformers import TrainerCallback, set_seed

from .._trl import BaseTrainer, is_conversational
from ..functional.advantages import compute_gae, explained_variance_from_moments
from ..functional.kl import per_token_kl
from ..functional.losses import clipped_surrogate_loss, clipped_value_loss
from ..functional.masking import masked_moments, masked_sum, merge_moments, whiten
from ..functional.rewards import combine_rewards, penalize_missing_eos, token_rewards
from ..functional.schedules import AdaptiveKLController, FixedKLController
from ..records import Advantages, Rollout, Scored, TokenChunk, TokenStats
from ..rewards.model import RewardModel
from ..rewards.runner import RewardRunner
from ..roles.actor_critic import ActorCritic
from ..roles.prepare import first_bad_parameter, freeze
from ..rollout.prompts import PromptTokenizer, prompt_rows, seeded_generator
from ..rollout.sampler import Sampling, sample, stop_token_ids
from ..rollout.scoring import ChunkPlan, gather_rows, plan_chunks, score_rollout
from . import inputs
from .checkpoints import CheckpointMixin
from .evaluation import EvaluationMixin
from .faults import FaultCounter
from .loader import RolloutLoader, mini_batches, take_rows
from .metrics import MetricSums, peak_memory_bytes
from .notices import warn_about_repaired_fields
from .ppo_config import PPOConfig


class PPOTrainer(CheckpointMixin, EvaluationMixin, BaseTrainer):
    """Proximal policy optimization (Schulman et al., 2017, arXiv 1707.06347) of a language model.

    The arguments of TRL 1.12's `PPOTrainer`, plus `reward_funcs`. Only `model`, a reward and `train_dataset` are needed.

    Args:
        args: `PPOConfig`. None: its defaults, in `trl-alpharl-ppo`.
        processing_class: the tokenizer. None: loaded by the model's name. It needs no pad token.
        model: the policy, a causal language model, a `PeftModel` or a name to load.
        ref_model: the reference of the KL penalty. None: the policy as it comes in.
        reward_model: a sequence classifier with one label.
        train_dataset: rows with `prompt` (text or chat turns) or `input_ids`; other columns reach the reward functions.
        value_model: a critic with its own weights, a sequence classifier. None: `args.critic` decides.
        data_collator: for `input_ids` rows; its `attention_mask` decides what counts.
        eval_dataset: like `train_dataset`, or a dict of such.
        optimizers, callbacks: as in transformers' `Trainer`.
        peft_config: wraps the policy in a fresh adapter.
        reward_funcs: callables with TRL's reward-function signature (sync or async), names of rewards, models; or a list.
        reward_processing_classes: tokenizers of the reward models, one each. None: their own.

    Raises ValueError or TypeError with one line that names the argument.
    """

    _tag_names = ["trl", "ppo", "trl-alpharl"]
    _name = "PPO"
    _paper = {
        "title": "Fine-Tuning Language Models from Human Preferences",
        "id": "1909.08593",
        "citation": textwrap.dedent("""\
            @article{ziegler2019finetuning,
                title  = {{Fine-Tuning Language Models from Human Preferences}},
                author = {Daniel M. Ziegler and others},
                year   = 2019,
                eprint = {arXiv:1909.08593}
            }"""),
    }
    config_class = PPOConfig

    def __init__(
        self,
        args: PPOConfig | None = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
    ) -> None:
        if model is None:
            raise ValueError("model is required: a causal language model or its name.")
        if ref_model is not None and ref_model is model:
            raise ValueError("ref_model is the same object as model; pass a copy, or None to let the trainer make one.")
        args = self.config_class(output_dir="trl-alpharl-ppo") if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"args is a {type(args).__name__}; {type(self).__name__} needs a {self.config_class.__name__}.")
        inputs.require_dataset(train_dataset, "train_dataset")
        tokenizer = inputs.load_tokenizer(processing_class, model)
        self.tokenize_prompts = PromptTokenizer(tokenizer, data_collator)
        inputs.check_datasets(self.tokenize_prompts, train_dataset, eval_dataset)

        set_seed(args.seed)  # fresh adapters are drawn from the seed
        policy = inputs.load_policy(model, args.model_init_kwargs, peft_config)
        rewards = inputs.resolve_rewards(reward_funcs, reward_model, reward_processing_classes, tokenizer, policy)
        self.reward_runner = RewardRunner(rewards, args.reward_weights)
        self.reward_model, self.ref_model = reward_model, ref_model
        actor_critic = ActorCritic(
            policy,
            reference=ref_model,
            value_model=inputs.prepare_value_model(value_model, policy, len(tokenizer)),
            critic=args.critic,
            critic_detach=args.critic_detach,
            model_adapter_name=args.model_adapter_name,
            ref_adapter_name=args.ref_adapter_name,
        )
        self.policy_model, self.value_model = policy, actor_critic.value_model
        self.user_args = args
        super().__init__(
            model=actor_critic,
            args=args.for_trainer(len(train_dataset)),
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=[*(callbacks or []), _EndOfStep(self)],
            optimizers=optimizers,
        )
        inputs.check_optimizer(self.optimizer, actor_critic)
        self._set_up_run()
        if self.is_world_process_zero():
            warn_about_repaired_fields(args)

    def _set_up_run(self) -> None:
        args, tokenizer = self.args, self.processing_class
        self.sampling = Sampling(
            response_length=args.response_length,
            temperature=args.temperature,
            stop_ids=stop_token_ids(args.stop_token, args.stop_token_id, tokenizer, self.model.generation_config),
            pad_id=next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0),
            chunk_rows=args.local_rollout_forward_batch_size,
        )
        self.kl_controller = (
            FixedKLController(args.kl_coef)
            if args.kl_target is None
            else AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
        )
        self.metrics = MetricSums()
        self.faults = FaultCounter()
        for reward in self.reward_runner.reward_funcs:
            if isinstance(reward, RewardModel):
                freeze(reward.model).to(self.accelerator.device)
        self._experience: Advantages | None = None
        self._plan: tuple[int, ChunkPlan, list[list[list[int]]]] | None = None
        self._started = time.time()
        self._update_started = 0.0

    def _send_telemetry(self) -> None:
        """TRL's usage ping is not sent."""

    # Stages

    def sample_prompts(self, index: int) -> list[int]:
        """The dataset rows of rollout `index`, over all processes."""
        return prompt_rows(len(self.train_dataset), self.args.batch_size, index, self.args.seed)

    def explore(self, prompts: list[list[int]], examples: list[dict[str, Any]], index: int) -> Rollout:
        """Completions of the behaviour policy; for PPO the policy itself."""
        seed = seeded_generator(self.args.seed, index, self.args.process_index, 1).initial_seed()
        return sample(self.model, prompts, examples, index, self.sampling, seed)

    def rollout(self, index: int | None = None) -> Rollout:
        """Sample the completions of rollout `index`; None: the one that the step counter has reached."""
        start = time.time()
        index = self.state.global_step // self.args.steps_per_rollout if index is None else index
        self._require_finite_weights()
        rows = self.sample_prompts(index)
        size = self.args.local_batch_size
        examples = take_rows(self.train_dataset, rows[self.args.process_index * size :][:size])
        try:
            with self.accelerator.autocast():
                rollout = self.explore(self.tokenize_prompts(examples), examples, index)
        except RuntimeError:
            self._require_finite_weights(all_of_them=True)
            raise
        self.metrics.add("time/rollout_s", time.time() - start)
        return rollout

    def score(self, rollout: Rollout) -> Scored:
        """Ask the rewards and, in one pass without gradients, policy, reference and critic."""
        start = time.time()
        scored = self._score(rollout, self.plan(rollout)[0], self.metrics)
        faulty = self._sum_over_processes(torch.tensor(float(not scored.finite), device=scored.scores.device)) > 0
        if faulty and scored.finite:
            scored = replace(scored, finite=False, cause="another process's reward or log-prob")
        self.metrics.add("time/score_s", time.time() - start)
        return scored

    def reward(self, rollout: Rollout, metrics: MetricSums) -> tuple[Tensor, Tensor, str]:
        """Scores (B,), which rows have one (B,), and what was not finite, if anything."""
        prompts, completions, columns = self._texts(rollout)
        ids = [row[mask].tolist() for row, mask in zip(rollout.completion_ids.cpu(), rollout.completion_mask.cpu())]
        extras = {
            "trainer_state": self.state,
            "log_metric": lambda name, value: metrics.add(name, value),
            "log_extra": lambda name, values: None,
        }
        table = self.reward_runner(prompts, completions, ids, columns, extras)
        device = rollout.completion_ids.device
        values = torch.tensor(table.values, dtype=torch.float64, device=device)
        given = torch.tensor(table.given, dtype=torch.bool, device=device)
        bad = given & ~values.isfinite()
        for column, name in enumerate(table.names):
            metrics.add_all(f"reward/{name}", values[:, column], given[:, column] & ~bad[:, column])
        cause = ", ".join(f"reward {name!r}" for column, name in enumerate(table.names) if bad[:, column].any())
        weights = torch.tensor(self.reward_runner.weights, dtype=torch.float64, device=device)
        scores, valid = combine_rewards(values.masked_fill(~given | bad, float("nan")), weights)
        return scores.float(), valid, cause

    def shape_rewards(self, scored: Scored, kl: Tensor, mask: Tensor) -> Tensor:
        """Token rewards (B, C): the KL penalty everywhere, the score on the last token."""
        rewards = token_rewards(scored.scores, kl, mask, self.kl_controller.kl_coef)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, self._merged_moments(rewards, mask), shift_mean=False)
        return rewards

    def estimate_advantages(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Whitened advantages and value targets, (B, C) each."""
        args = self.args
        advantages, returns = compute_gae(rewards, values, mask, args.gamma, args.lam)
        if args.lam_critic is not None:
            returns = compute_gae(rewards, values, mask, args.gamma, args.lam_critic)[1]
        return whiten(advantages, mask, self._merged_moments(advantages, mask)), returns

    def advantages(self, scored: Scored) -> Advantages:
        """Token rewards, advantages and value targets of a scored rollout; its metrics are recorded here."""
        mask = scored.rollout.completion_mask & scored.valid.unsqueeze(1)
        kl = self._kl(scored)
        rewards = self.shape_rewards(scored, kl, mask)
        advantages, returns = self.estimate_advantages(rewards, scored.values, mask)
        experience = Advantages(scored, mask, rewards, advantages, returns)
        if scored.finite:
            self._record_rollout(experience, kl)
        else:
            self.faults.record(scored.cause, self.args.steps_per_rollout)
        return experience

    def policy_loss(self, stats: TokenStats, chunk: TokenChunk, experience: Advantages, tokens: Tensor) -> tuple[Tensor, dict]:
        """The clipped surrogate of a chunk over the mini-batch's `tokens`, and sums for the metrics."""
        args = self.args
        loss = clipped_surrogate_loss(
            stats.per_token_logps,
            gather_rows(chunk, experience.scored.old_per_token_logps),
            gather_rows(chunk, experience.advantages),
            chunk.completion_mask & gather_rows(chunk, experience.mask),
            args.cliprange,
            args.cliprange if args.cliprange_high is None else args.cliprange_high,
            tokens,
        )
        return loss.loss, {
            "loss/policy_avg": loss.loss.detach(),
            "policy/approxkl_avg": loss.approx_kl_sum / tokens,
            "policy/clipfrac_avg": loss.clipped_count / tokens,
            "val/ratio": loss.ratio_sum / tokens,
        }

    def value_loss(self, stats: TokenStats, chunk: TokenChunk, experience: Advantages, tokens: Tensor) -> tuple[Tensor, dict]:
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

    def after_update(self, experience: Advantages) -> None:
        """The rollout is used up: controllers react."""
        if experience.scored.finite:
            kl, rows = self._sum_over_processes(
                torch.stack([self._kl(experience.scored).sum(), experience.scored.valid.sum()]).double()
            ).tolist()
            self.kl_controller.update(kl / max(rows, 1.0), self.args.batch_size)

    # One optimizer step

    def collect(self, step: int) -> Advantages:
        """The experience that optimizer step `step` trains on: the one at hand, or a new rollout."""
        index = step // self.args.steps_per_rollout
        if self._experience is None or self._experience.scored.rollout.index != index:
            self._experience = self.advantages(self.score(self.rollout(index)))
        return self._experience

    def mini_batch(self, experience: Advantages, step: int) -> dict[str, Any]:
        """What `training_step` takes: the experience and the rows of one mini-batch on this process."""
        epoch, number = divmod(step % self.args.steps_per_rollout, self.args.num_mini_batches)
        if step % self.args.steps_per_rollout == 0:
            self._update_started = time.time()
        return {"experience": experience, "rows": self.plan(experience.scored.rollout)[1][epoch][number]}

    def plan(self, rollout: Rollout) -> tuple[ChunkPlan, list[list[list[int]]]]:
        """A rollout's chunk shapes and mini-batches; they follow from its lengths and the seed."""
        if self._plan is None or self._plan[0] != rollout.index or len(self._plan[1].lengths) != len(rollout.finished):
            args = self.args
            seed = (args.seed, rollout.index, args.process_index)
            batches = mini_batches(args.local_batch_size, args.num_mini_batches, args.num_ppo_epochs, seed)
            rows = min(args.per_device_train_batch_size, args.local_mini_batch_size)
            self._plan = (rollout.index, plan_chunks(rollout, batches, rows), batches)
        return self._plan[1:]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Gradients of one mini-batch, in chunks of at most per_device_train_batch_size rows.

        A mini-batch that cannot be trained on runs no backward and leaves every `p.grad` None, so that the optimizer
        changes neither weights nor moments.
        """
        model.train()
        experience, rows = inputs["experience"], inputs["rows"]
        device = experience.mask.device
        tokens = self._sum_over_processes(experience.mask[torch.tensor(rows, device=device)].sum())
        if not experience.scored.finite or tokens == 0:
            return torch.zeros((), device=self.args.device)
        chunks = list(self.plan(experience.scored.rollout)[0].chunks(experience.scored.rollout, rows))
        totals: dict[str, Tensor] = {}
        for number, chunk in enumerate(chunks):
            with nullcontext() if number == len(chunks) - 1 else self.accelerator.no_sync(model):
                loss, sums = self.chunk_loss(model, chunk, experience, tokens)
                self.accelerator.backward(loss * self.accelerator.num_processes)
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        self._finish_step(model, totals)
        return sum(totals[name] for name in ("loss/policy_avg", "loss/value_avg") if name in totals).to(self.args.device)

    def chunk_loss(self, model: Any, chunk: TokenChunk, experience: Advantages, tokens: Tensor) -> tuple[Tensor, dict]:
        """A chunk's share of the loss and of the mini-batch's metrics."""
        want = "value" if self.state.global_step < self.args.critic_warmup_steps else "policy+value"
        with self.accelerator.autocast():
            stats = model(
                input_ids=chunk.input_ids,
                attention_mask=chunk.attention_mask,
                position_ids=chunk.position_ids,
                predict_at=chunk.predict_at,
                completion_ids=chunk.completion_ids,
                temperature=self.args.temperature,
                want=want,
            )
        loss, sums = self.value_loss(stats, chunk, experience, tokens)
        loss = self.args.vf_coef * loss
        if want != "value":
            policy_loss, policy_sums = self.policy_loss(stats, chunk, experience, tokens)
            mask = chunk.completion_mask & gather_rows(chunk, experience.mask)
            sums |= policy_sums | {"policy/entropy_avg": masked_sum(stats.entropies.detach(), mask) / tokens}
            loss = loss + policy_loss
        return loss, sums

    def _finish_step(self, model: Any, totals: dict[str, Tensor]) -> None:
        """Record a step's metrics, or drop its gradients when something in it is not finite."""
        names = sorted(totals)
        values = self._sum_over_processes(torch.stack([totals[name].detach().double() for name in names]))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        scaled = self.accelerator.scaler is not None  # fp16: the scaler skips by itself
        finite = bool(values.isfinite().all()) and (scaled or bool(torch.nn.utils.get_total_norm(gradients).isfinite()))
        if not finite:
            model.zero_grad(set_to_none=True)
            bad = [name for name, value in zip(names, values) if not value.isfinite()]
            self.faults.record(", ".join(bad) or "the gradient", 1)
            return
        self.faults.good_step()
        for name, value in zip(names, values):
            self.metrics.add(name, value)
            if name == "val/ratio":
                self.metrics.add("val/ratio_squared", value * value)

    def update(self, experience: Advantages) -> dict[str, float]:
        """All optimizer steps of one rollout, for a loop of one's own; `train()` does the same. Returns the metrics."""
        model = self._ready_for_own_loop()
        for _ in range(self.args.steps_per_rollout):
            self.training_step(model, self.mini_batch(experience, self.state.global_step))
            if self.args.max_grad_norm > 0:
                self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.lr_scheduler.step()
            model.zero_grad()
            self.state.global_step += 1
            self._experience = experience
            self.end_of_step()
        return self._flush_metrics()

    def end_of_step(self) -> None:
        """Bookkeeping after an optimizer step, before anything is logged or saved."""
        args, steps = self.args, self.args.steps_per_rollout
        rollouts = -(-self.state.global_step // steps)
        self.state.episode = rollouts * args.batch_size
        self.state.epoch = self.state.global_step / steps * args.batch_size / len(self.train_dataset)
        if self.state.global_step % steps == 0 and self._experience is not None:
            self.metrics.add("time/update_s", time.time() - self._update_started)
            self.after_update(self._experience)
            self._experience = None
            if self._sample_table_due():
                self.generate_completions(sampling=True)

    # Helpers of the stages

    def _score(self, rollout: Rollout, plan: ChunkPlan, metrics: MetricSums) -> Scored:
        scores, valid, cause = self.reward(rollout, metrics)
        if self.args.missing_eos_penalty is not None:
            scores = penalize_missing_eos(scores, rollout.finished, self.args.missing_eos_penalty)
        scores = scores.masked_fill(~valid, 0.0)
        with self.accelerator.autocast():
            stats, reference = score_rollout(self.model, rollout, plan, self.args.temperature)
        for name, tensor in (("log-probs", stats.per_token_logps), ("reference log-probs", reference), ("values", stats.values)):
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
        )

    def _texts(self, rollout: Rollout) -> tuple[list, list, dict[str, list]]:
        """Prompts and completions as the reward functions see them, and the other columns."""
        tokenizer = self.processing_class
        ids = [row[mask] for row, mask in zip(rollout.completion_ids, rollout.completion_mask)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompts, completions = [], []
        for row, (example, text) in enumerate(zip(rollout.examples, texts)):
            prompt = example.get("prompt")
            if prompt is None:
                prompt = tokenizer.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]], skip_special_tokens=True)
            chat = is_conversational({"prompt": prompt})
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
        self.metrics.add("response_tokens", lengths, 1 / self.accelerator.num_processes)
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

    def _ready_for_own_loop(self) -> Any:
        if self.optimizer is None or self.lr_scheduler is None:
            if self.args.gradient_checkpointing:
                self.model.activation_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
            self.create_optimizer()
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.create_scheduler(num_training_steps=self.args.max_steps)
        return self.model_wrapped

    # What transformers' Trainer asks for

    def get_train_dataloader(self) -> RolloutLoader:
        """Mini-batches of rollout after rollout."""
        return RolloutLoader(
            self.train_dataset,
            self.args.batch_size,
            self.args.steps_per_rollout,
            step=lambda: self.state.global_step,
            item=lambda step: self.mini_batch(self.collect(step), step),
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """transformers' optimizer; the critic's own parameters at `critic_learning_rate` when it is set."""
        passed = self.optimizer is not None
        optimizer = super().create_optimizer() if model is None else super().create_optimizer(model)
        if not passed and self.args.critic_learning_rate is not None:
            inputs.split_critic_groups(optimizer, self.model.critic_parameters(), self.args.critic_learning_rate)
        return optimizer

    def get_total_train_batch_size(self, args: Any) -> int:
        """Completions per optimizer step, for the loop's report."""
        return args.mini_batch_size

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: a step's cost is not that of one forward over its inputs."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with our metrics since the last time."""
        if not any(name.startswith("eval_") for name in logs):
            logs = {**logs, **self._flush_metrics()}
        super().log(logs, start_time)

    def _flush_metrics(self) -> dict[str, float]:
        means = self.metrics.flush(self._sum_over_processes, self._union_over_processes)
        if not means:
            return {}
        squared = means.pop("val/ratio_squared", None)
        if squared is not None:
            means["val/ratio_var"] = max(0.0, squared - means["val/ratio"] ** 2)
        tokens = means.pop("response_tokens", None)
        seconds = [means.get(f"time/{part}_s") for part in ("rollout", "score", "update")]
        if tokens is not None and None not in seconds:
            means["response_tokens_per_s"] = tokens / max(sum(seconds), 1e-9)
        episode = getattr(self.state, "episode", 0)
        means["episode"] = episode
        means["eps"] = episode / max(time.time() - self._started, 1e-9)
        means["val/skipped_steps"] = self.faults.skipped_steps
        means["memory/peak_bytes"] = peak_memory_bytes(self.args.device)
        if self.lr_scheduler is not None:
            means["lr"] = self.lr_scheduler.get_last_lr()[0]
        return means


class _EndOfStep(TrainerCallback):
    """Calls the trainer's `end_of_step` before transformers logs, evaluates or saves."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.end_of_step()


