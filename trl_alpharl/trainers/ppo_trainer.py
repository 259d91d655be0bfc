"""PPO on transformers' training loop. The algorithm is in stages.py; here are the constructor, one optimizer step and
the loop of one's own."""

from __future__ import annotations

import os
import textwrap
import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, set_seed

from .._trl import BaseTrainer
from ..functional.masking import masked_sum
from ..functional.schedules import AdaptiveKLController, FixedKLController
from ..lowrank.callback import LowRankGradientCallback
from ..lowrank.mixin import LowRankMixin
from ..records import Advantages, Rollout, TokenChunk
from ..rewards.model import RewardModel
from ..rewards.runner import RewardRunner
from ..roles.actor_critic import ActorCritic, Wanted
from ..roles.prepare import freeze, refuse_shared_weights
from ..rollout.prompts import PromptTokenizer
from ..rollout.sampler import Sampling, stop_token_ids
from ..rollout.scoring import ChunkPlan, gather_rows
from . import inputs
from .checkpoints import CheckpointMixin
from .engine import require_engine, start_engine
from .evaluation import EvaluationMixin
from .faults import FaultCounter
from .metrics import MetricSums
from .notices import warn_about_repaired_fields
from .ppo_config import PPOConfig
from .stages import PPOStages
from .trainer_hooks import TrainerHooks


class PPOTrainer(PPOStages, TrainerHooks, EvaluationMixin, CheckpointMixin, LowRankMixin, BaseTrainer):
    """Proximal policy optimization (Schulman et al., 2017, arXiv 1707.06347) of a language model.

    TRL 1.12's arguments, plus `reward_funcs`. Only `model`, a reward and `train_dataset` are needed.

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
        reward_funcs: a callable with TRL's reward-function signature (sync or async), the name of a reward, a model;
            or a list of these.
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
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        args = self.config_class(output_dir="trl-alpharl-ppo") if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(
                f"args is a {type(args).__name__}; {type(self).__name__} needs a {self.config_class.__name__}."
            )
        require_engine(args)
        inputs.check_roles(model, ref_model, value_model, args.critic, peft_config)
        inputs.check_top_layers(args.lora_top_layers, peft_config)
        inputs.require_dataset(train_dataset, "train_dataset")
        tokenizer = inputs.load_tokenizer(processing_class, model)
        self.tokenize_prompts = PromptTokenizer(tokenizer, data_collator, args.chat_template_kwargs)
        inputs.check_datasets(self.tokenize_prompts, train_dataset, eval_dataset)
        rewards = inputs.list_rewards(reward_funcs, reward_model, args.reward_weights)

        set_seed(args.seed)  # fresh adapters are drawn from the seed
        policy = inputs.load_policy(model, args.model_init_kwargs, peft_config, args.lora_top_layers)
        rewards = inputs.resolve_rewards(rewards, None, reward_processing_classes, tokenizer, policy)
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
            fuse_lora=args.fuse_lora,
            fuse_norms=args.fuse_norms,
            merge_in_rollouts=args.merge_lora_in_rollouts,
            cache_frozen_layers=args.cache_frozen_layers,
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
            callbacks=[*inputs.callback_list(callbacks), *_low_rank_callbacks(args), _EndOfStep(self)],
            optimizers=optimizers,
            low_rank=args.low_rank if args.lowrank == "optimizer" else None,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # set by the launcher, not by a field of args
            raise ValueError("FSDP and DeepSpeed are not supported; use configs/accelerate/ddp.yaml.")
        self._set_up_run()
        inputs.check_optimizer(self.optimizer, actor_critic, args.critic_learning_rate)
        if self.is_world_process_zero():
            warn_about_repaired_fields(args)

    def _set_up_run(self) -> None:
        args, tokenizer = self.args, self.processing_class
        embedded = self.policy_model.get_input_embeddings().weight.shape[0]
        self.tokenize_prompts.num_embeddings = embedded
        self.model.fit_to_device(self.accelerator.device)
        if args.compile_layers:
            self.model.compile_layers()
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id)  # a [PAD] that a script added may lie past the end
        self.sampling = Sampling(
            response_length=args.response_length,
            temperature=float(args.temperature),  # generate refuses an int
            stop_ids=stop_token_ids(args.stop_token, args.stop_token_id, tokenizer, self.model.generation_config),
            pad_id=next((pad for pad in pads if pad is not None and pad < embedded), 0),
            chunk_rows=args.local_rollout_forward_batch_size,
            drop_finished_rows=args.drop_finished_rows,
        )
        self.engine = start_engine(args, self.model, self.accelerator, tokenizer, self.sampling)
        self.kl_controller = (
            FixedKLController(args.kl_coef)
            if args.kl_target is None
            else AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
        )
        self.metrics = MetricSums()
        self.faults = FaultCounter()
        for reward in self.reward_runner.reward_funcs:
            if isinstance(reward, RewardModel):
                roles = {"model": self.policy_model, "value_model": self.value_model}
                refuse_shared_weights(reward.model, roles, "reward_model")
                freeze(reward.model).to(self.accelerator.device)
                reward.shares_vocabulary = reward.tokenizer.get_vocab() == tokenizer.get_vocab()
        self._experience: Advantages | None = None
        self._plan: tuple[Rollout, ChunkPlan, list[list[list[int]]]] | None = None
        self._saved_bytes: float | None = None  # a token, measured when a memory budget first asks
        self._started = time.time()
        self._update_started = self._collect_s = 0.0
        self._ready = False

    def _send_telemetry(self) -> None:
        """TRL's usage ping is not sent."""

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
        if step % self.args.steps_per_rollout == 0 or not self._update_started:  # resumed in the middle of a rollout
            self._update_started = time.time()
        return {"experience": experience, "rows": self.plan(experience.scored.rollout)[1][epoch][number]}

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Gradients of one mini-batch, in chunks of at most per_device_train_batch_size rows.

        A mini-batch that cannot be trained on runs no backward and leaves every `p.grad` None, so that the optimizer
        changes neither weights nor moments.
        """
        model.train()
        experience, rows = inputs["experience"], inputs["rows"]
        device = experience.mask.device
        tokens = self._sum_over_processes(experience.mask[torch.tensor(rows, device=device)].sum())
        if not experience.scored.finite:
            self.faults.skipped_step()
        if not experience.scored.finite or tokens == 0:
            return torch.zeros((), dtype=torch.float32, device=self.args.device)
        # Built one by one: all chunks of a mini-batch together take more memory than the rollout record.
        chunks = self.plan(experience.scored.rollout)[0].chunks(experience.scored.rollout, rows)
        chunk = next(chunks, None)
        totals: dict[str, Tensor] = {}
        whole_loss = torch.zeros((), dtype=torch.float32, device=self.args.device)
        while chunk is not None:
            following = next(chunks, None)
            chunk = self.plan(experience.scored.rollout)[0].with_frozen(chunk, self.model)
            for want in self.passes():
                with self.gradient_sync(model, last=following is None):
                    loss, sums = self.chunk_loss(model, chunk, experience, tokens, want)
                    loss = loss * self.accelerator.num_processes  # DDP averages gradients over processes
                    self.accelerator.backward(loss)
                whole_loss += loss.detach()
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
                del loss, sums
            chunk = following
        self._finish_step(model, totals)
        return whole_loss

    def chunk_loss(
        self, model: Any, chunk: TokenChunk, experience: Advantages, tokens: Tensor, want: Wanted
    ) -> tuple[Tensor, dict]:
        """A chunk's share of the loss and of the mini-batch's metrics, of the roles that are wanted."""
        with self.accelerator.autocast():
            stats = model(
                input_ids=chunk.input_ids,
                attention_mask=chunk.attention_mask,
                position_ids=chunk.position_ids,
                predict_at=chunk.predict_at,
                completion_ids=chunk.completion_ids,
                temperature=self.args.temperature,
                want=want,
                entropy_grad=self.entropy_learns(),
                frozen_hidden=chunk.frozen_hidden,
            )
        loss, sums = torch.zeros((), device=self.args.device), {}
        if want != "policy":
            value_loss, sums = self.value_loss(stats, chunk, experience, tokens)
            loss = self.args.vf_coef * value_loss
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
        scaled = self.accelerator.scaler is not None  # fp16: the scaler skips by itself
        finite = bool(values.isfinite().all()) and (scaled or bool(self.gradient_norm(model).isfinite()))
        if not finite:
            self._require_finite_weights(all_of_them=True)
            self.drop_gradients(model)
            bad = [name for name, value in zip(names, values) if not value.isfinite()]
            self.faults.skipped_step()
            self.faults.record(", ".join(bad) or "the gradient", 1)
            return
        self.faults.good_step()
        if not self.admit_step(dict(zip(names, values.tolist()))):
            model.zero_grad(set_to_none=True)
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
                self._clip_grad_norm(model)
            self._tell_gradient_callbacks("on_pre_optimizer_step")
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
            self._record_speed(self._experience)
            self.after_update(self._experience)
            self._experience = self._plan = None
            if self._sample_table_due():
                self.generate_completions(sampling=True)

    def _record_speed(self, experience: Advantages) -> None:
        update_s = time.time() - self._update_started
        self.metrics.add("time/update_s", update_s)
        if self._collect_s:  # 0 where this process resumed a rollout that another one collected
            rollout = experience.scored.rollout
            tokens = rollout.completion_mask[: rollout.fresh].sum()
            seconds = (self._collect_s + update_s) / self.accelerator.num_processes
            self.metrics.add("response_tokens_per_s", tokens, seconds)
        self._collect_s = 0.0

    def forget_old_rollout(self) -> None:
        """At the start of training: a rollout that an earlier call left unfinished is not this run's."""
        if self.state.global_step % self.args.steps_per_rollout == 0:
            self._experience = None

    def _ready_for_own_loop(self) -> Any:
        if self.model_wrapped is self.model and not self._ready:
            self._ready = True
            if self.args.gradient_checkpointing:
                self.model.activation_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
            self.create_optimizer()
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.create_scheduler(num_training_steps=self.args.max_steps)
            self._tell_gradient_callbacks("on_train_begin")
        return self.model_wrapped

    def _tell_gradient_callbacks(self, event: str) -> None:
        """In a loop of one's own callbacks are not called; those that change gradients are part of the update."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, LowRankGradientCallback):
                getattr(callback, event)(
                    self.args, self.state, self.control, model=self.model, optimizer=self.optimizer
                )


def _low_rank_callbacks(args: PPOConfig) -> list[TrainerCallback]:
    return [LowRankGradientCallback(args.low_rank)] if args.lowrank == "callback" else []


class _EndOfStep(TrainerCallback):
    """Calls the trainer's `end_of_step` before transformers logs, evaluates or saves."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.forget_old_rollout()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.end_of_step()
