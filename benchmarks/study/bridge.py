"""The same task, model and configuration through `ARPOTrainer`: the study's loop must not be a study of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from trl_alpharl import ARPOTrainer

from .loop import evaluated
from .tasks import EOS, PAD, VOCABULARY, Task

# The trainer's evaluations draw alike each time, so that only more completions make their error smaller.
COMPLETIONS = 8


def tokenizer() -> PreTrainedTokenizerFast:
    """Words t0 .. t23 for the ids of the study."""
    words = {f"t{token}": token for token in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token=f"t{PAD}"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=f"t{PAD}", eos_token=f"t{EOS}")


def critic(model: Any) -> LlamaForSequenceClassification:
    """A critic with weights of its own that starts from the policy's trunk and says 0."""
    value_model = LlamaForSequenceClassification(LlamaConfig(**{**model.config.to_dict(), "num_labels": 1}))
    value_model.model.load_state_dict(model.model.state_dict())
    torch.nn.init.zeros_(value_model.score.weight)
    return value_model


def train(task: Task, args: Any, model: Any, seed: int, folder: Path) -> list[dict[str, Any]]:
    """One run by the trainer: measurements before it and after each rollout, as the study's loop gives them."""

    def reward(completion_ids: list, input_ids: list, trainer_state: Any, **kwargs: Any) -> list[float]:
        progress = trainer_state.global_step / max(1, trainer_state.max_steps)
        return [sum(task.rewards(p, c, progress)) for p, c in zip(input_ids, completion_ids)]

    rows = Dataset.from_dict({"input_ids": task.prompts})
    asked = evaluated(task) * COMPLETIONS
    every = args.steps_per_rollout
    args = replace(args, seed=seed, output_dir=str(folder), eval_strategy="steps", eval_steps=every, disable_tqdm=True)
    trainer = ARPOTrainer(
        args=replace(
            args,
            per_device_eval_batch_size=len(asked),
            save_strategy="no",
            num_sample_generations=0,
            logging_steps=every,
        ),
        processing_class=tokenizer(),
        model=model,
        value_model=critic(model),
        train_dataset=rows,
        eval_dataset=rows.select(asked),
        reward_funcs=reward,
    )
    return [{"seed": seed, **row} for row in measured(trainer)]


def measured(trainer: Any) -> list[dict[str, Any]]:
    """Train, and tell what the evaluation set showed before it and after each rollout."""
    every, size = trainer.args.steps_per_rollout, trainer.args.batch_size
    before = trainer.evaluate()
    trainer.train()
    logs = [{**before, "step": 0}, *(log for log in trainer.state.log_history if "eval_objective/scores" in log)]
    kept = {log["step"]: log for log in logs}  # the evaluation before the training was logged too
    return [
        {
            "episodes": step // every * size,
            "score": log["eval_objective/scores"],
            "kl": log["eval_objective/kl"],
            "entropy": log["eval_objective/entropy"],
        }
        for step, log in sorted(kept.items())
    ]
