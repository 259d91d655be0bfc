"""TRL 1.12's side, in a process and an environment of its own: python -m speed.run_trl WORK.json RESULT.json"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from . import models
from .clock import PhaseClock
from .result import write_result
from .work import REWARD_MODULUS, Work, common_settings, count_tokens


class LastTokenReward(nn.Module):
    """The cheapest module that TRL's `get_reward` accepts: its "hidden state" of a token is already the reward."""

    base_model_prefix = "body"

    def body(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        """What a decoder would return: one hidden state, (B, L, 1)."""
        return SimpleNamespace(hidden_states=((input_ids % REWARD_MODULUS).float().unsqueeze(-1),))

    def score(self, hidden: Tensor) -> Tensor:
        """What a classifier's head would return."""
        return hidden


class _EndOfUpdate(TrainerCallback):
    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.end_update()


def put_on_clock(trainer: PPOTrainer, clock: PhaseClock, work: Work) -> None:
    """Phases by what TRL calls: generation, then scoring, then the first forward of policy and critic together."""
    generate = ppo_trainer.batch_generation

    def clocked(model: nn.Module, queries: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        clock.enter("rollout")
        rows, logits = generate(model, queries, *args)
        clock.tokens = count_tokens(rows[:, queries.shape[1] :].tolist(), work.stop_token_id)
        clock.enter("score")
        return rows, logits

    def begin_update(*_: Any) -> None:
        if clock.phase == "score":
            clock.enter("update")

    ppo_trainer.batch_generation = clocked
    trainer.model.register_forward_pre_hook(begin_update)
    trainer.add_callback(_EndOfUpdate(clock))


def build(work: Work, folder: Path) -> PPOTrainer:
    """The trainer of a work, before its first step; what it writes goes to `folder`."""
    tokenizer = models.load_tokenizer(work)
    args = PPOConfig(
        output_dir=str(folder),
        bf16=work.device == "cuda",
        **common_settings(work),
    )
    dataset = Dataset.from_dict({"input_ids": work.prompts})
    return PPOTrainer(
        args,
        tokenizer,
        model=models.load_policy(work, tokenizer.pad_token_id),
        ref_model=None,
        reward_model=LastTokenReward(),
        value_model=models.load_value_model(work),
        train_dataset=dataset,
        eval_dataset=dataset,  # never used, but it must be there
        peft_config=models.lora_config(work, by_layers=True),
    )


def main(work_file: str, result_file: str) -> None:
    """Run the work and write what the clock saw."""
    work, result = Work.read(Path(work_file)), Path(result_file)
    trainer = build(work, result.parent / "run")
    clock = PhaseClock(work.device)
    put_on_clock(trainer, clock, work)
    trainer.train()
    write_result(result, clock)


if __name__ == "__main__":
    main(*sys.argv[1:])
