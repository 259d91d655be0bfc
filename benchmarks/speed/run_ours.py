"""Our side, in a process of its own: python -m speed.run_ours ppo|sft|ending WORK.json RESULT.json

ppo: PPO. sft: the memory of supervised fine-tuning. ending: a token id that ends answers at half length on average.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from trl_alpharl import PPOConfig, PPOTrainer
from trl_alpharl.functional.masking import masked_sum
from trl_alpharl.records import Advantages, Rollout, Scored, TokenChunk
from trl_alpharl.rollout.prompts import pad_left

from . import models
from .clock import PhaseClock
from .result import write_result
from .work import REWARD_MODULUS, Work, common_settings, count_tokens, ending_token


class ClockedPPOTrainer(PPOTrainer):
    """PPO as it is, with a clock that knows its phases."""

    clock: PhaseClock

    def rollout(self, index: int | None = None) -> Rollout:
        """Sample, on the clock."""
        self.clock.enter("rollout")
        rollout = super().rollout(index)
        self.clock.tokens = count_tokens(rollout.completion_ids.tolist(), self.args.stop_token_id)
        return rollout

    def score(self, rollout: Rollout) -> Scored:
        """Score, on the clock. Advantages count to it."""
        self.clock.enter("score")
        return super().score(rollout)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The update begins with the first of its steps."""
        if self.clock.phase == "score":
            self.clock.enter("update")
        return super().training_step(*args, **kwargs)


class SupervisedTrainer(ClockedPPOTrainer):
    """The same module, chunked head, adapters and micro-batches under a cross-entropy loss: the memory that supervised
    fine-tuning takes. "Completions" are random tokens; nothing is generated or scored."""

    def explore(self, prompts: list[list[int]], examples: list[dict[str, Any]], index: int) -> Rollout:
        """Random completions of full length."""
        shape = (len(prompts), self.args.response_length)
        ids = torch.randint(2, self.model.config.vocab_size, shape, device=self.args.device)
        prompt_ids, prompt_mask = pad_left(prompts, self.sampling.pad_id, self.args.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return Rollout(index, prompt_ids, prompt_mask, ids, mask, torch.zeros_like(mask[:, 0]), examples)

    def score(self, rollout: Rollout) -> Scored:
        """There are no scores."""
        self.clock.enter("score")
        per_token = torch.zeros(rollout.completion_ids.shape, device=self.args.device)
        scores = per_token[:, 0]
        valid = torch.ones_like(scores, dtype=torch.bool)
        return Scored(rollout, per_token, per_token, per_token, per_token, scores, valid, finite=True)

    def passes(self) -> tuple[str, ...]:
        """The policy alone."""
        return ("policy",)

    def chunk_loss(
        self, model: Any, chunk: TokenChunk, experience: Advantages, tokens: Tensor, want: str
    ) -> tuple[Tensor, dict]:
        """Cross-entropy of the completion tokens."""
        stats = model(
            input_ids=chunk.input_ids,
            attention_mask=chunk.attention_mask,
            position_ids=chunk.position_ids,
            predict_at=chunk.predict_at,
            completion_ids=chunk.completion_ids,
            want=want,
        )
        loss = -masked_sum(stats.per_token_logps, chunk.completion_mask) / tokens
        return loss, {"loss/policy_avg": loss.detach()}


class _EndOfUpdate(TrainerCallback):
    def __init__(self, clock: PhaseClock, steps: int) -> None:
        self._clock, self._steps = clock, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._steps == 0:
            self._clock.end_update()


def last_token_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Cheap, and the same as TRL's side has."""
    return [float(ids[-1] % REWARD_MODULUS) for ids in completion_ids]


def build(work: Work, folder: Path, trainer: type[ClockedPPOTrainer] = ClockedPPOTrainer) -> ClockedPPOTrainer:
    """The trainer of a work, before its first step; what it writes goes to `folder`."""
    tokenizer = models.load_tokenizer(work)
    own = {} if work.lora_top_layers is None else {"lora_top_layers": work.lora_top_layers}
    args = PPOConfig(
        output_dir=str(folder),
        **common_settings(work),
        logging_steps=work.ppo_epochs,
        **own,
        **work.settings,
    )
    built = trainer(
        args,
        tokenizer,
        models.load_policy(work, tokenizer.pad_token_id),
        train_dataset=Dataset.from_dict({"input_ids": work.prompts}),
        reward_funcs=last_token_reward,
        peft_config=models.lora_config(work, by_layers=False),
    )
    built.clock = PhaseClock(work.device)
    built.add_callback(_EndOfUpdate(built.clock, args.steps_per_rollout))
    return built


def main(kind: str, work_file: str, result_file: str) -> None:
    """Run the work and write what the clock saw, or the token."""
    work, result = Work.read(Path(work_file)), Path(result_file)
    trainer = build(work, result.parent / "run", SupervisedTrainer if kind == "sft" else ClockedPPOTrainer)
    if kind == "ending":
        sampled = trainer.rollout(0).completion_ids.tolist()
        result.write_text(json.dumps({"stop_token_id": ending_token(sampled)}))
        return
    trainer.train()
    write_result(result, trainer.clock)


if __name__ == "__main__":
    main(*sys.argv[1:])
