"""What two processes do together; test_distributed.py starts it with `accelerate launch` and reads what it writes.

Usage: two_processes.py FOLDER, where FOLDER holds `model/` (a tiny model with its tokenizer) and `prompts.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_alpharl import PPOConfig, PPOTrainer
from trl_alpharl.metrics_table import is_reproducible
from trl_alpharl.records import Rollout
from trl_alpharl.rollout.prompts import prompt_rows

SEED = 7
ROLLOUT = 8  # completions of all processes together


class GivenAnswers(PPOTrainer):
    """Answers that follow from the prompt, so that any number of processes trains on the same rows."""

    def explore(self, prompts, examples, index):
        rollout = super().explore(prompts, examples, index)
        lengths = torch.tensor([1 + sum(prompt) % 6 for prompt in prompts])
        ids = torch.stack(
            [torch.randint(2, 64, (6,), generator=torch.Generator().manual_seed(sum(prompt))) for prompt in prompts]
        )
        mask = torch.arange(6) < lengths.unsqueeze(1)
        finished = torch.zeros(len(prompts), dtype=torch.bool)
        return Rollout(index, rollout.prompt_ids, rollout.prompt_mask, ids * mask, mask, finished, examples)


class KeepGradients(TrainerCallback):
    """The gradients of the first optimizer step."""

    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            model = getattr(model, "module", model)
            self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def score(prompts, completions, silent, **kwargs):
    """The length of the longest word; no opinion on silent rows."""
    return [None if quiet else float(len(set(text.split()))) for text, quiet in zip(completions, silent)]


def bad_on_the_second_process(prompts, completions, trainer_state, **kwargs):
    bad = os.environ.get("RANK") == "1" and trainer_state.global_step == 0
    return [float("nan") if bad else float(row) for row in range(len(completions))]


def load(folder: Path, silent_rows: int = 0):
    """Tokenizer, a fresh policy and the prompts, of which the last rows of the first rollout may be silent."""
    prompts = json.loads((folder / "prompts.json").read_text())
    first = prompt_rows(len(prompts), ROLLOUT, 0, SEED)
    silent = set(first[ROLLOUT - silent_rows :])
    rows = {"prompt": prompts, "silent": [row in silent for row in range(len(prompts))]}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder / "model"), Dataset.from_dict(rows)


def make(folder: Path, name: str, cls=PPOTrainer, silent_rows=0, reward=score, lora=True, processes=2, **changes):
    """A trainer whose rollout of 8 is shared by `processes` processes."""
    tokenizer, model, dataset = load(folder, silent_rows)
    values = {
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ROLLOUT // 2 // processes,
        "num_ppo_epochs": 2,
        "total_episodes": 2 * ROLLOUT,
        "response_length": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_sample_generations": 0,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": SEED,
    }
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return cls(
        PPOConfig(**{**values, **changes}),
        tokenizer,
        model,
        train_dataset=dataset,
        eval_dataset=dataset.select([0]),
        reward_funcs=reward,
        peft_config=config if lora else None,
    )


def gradients(folder: Path, silent_rows: int = 0, processes: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of one step over given answers, one mini-batch of 8 rows, not clipped."""
    keep = KeepGradients()
    run = make(
        folder, "gradients", GivenAnswers, silent_rows, lora=False, processes=processes, max_grad_norm=0.0, max_steps=1
    )
    run.add_callback(keep)
    run.train()
    return keep.gradients


def write(folder: Path, name: str, run: PPOTrainer) -> None:
    """What a run became on this process."""
    rank = run.args.process_index
    tensors = {key: tensor.contiguous().clone() for key, tensor in run.model.state_dict().items()}
    save_file(tensors, folder / f"{name}-{rank}.safetensors")
    logs = [{key: value for key, value in entry.items() if is_reproducible(key)} for entry in run.state.log_history]
    facts = {"logs": logs, "controllers": run.kl_controller.state_dict()}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(facts))


def main(folder: Path) -> None:
    values = {
        "num_mini_batches": 2,
        "kl_target": 0.5,
        "kl_horizon": 50,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    run = make(folder, "straight", **values)
    run.train()
    write(folder, "straight", run)
    table = run.generate_completions()
    rank = run.args.process_index
    (folder / f"table-{rank}.json").write_text(json.dumps(table))
    for step in (3, 4):
        resumed = make(folder, f"resumed-{step}", **values)
        resumed.train(resume_from_checkpoint=str(folder / "straight" / f"checkpoint-{step}"))
        write(folder, f"resumed-{step}", resumed)

    for silent_rows in (0, ROLLOUT // 2):
        save_file(gradients(folder, silent_rows), folder / f"gradients-{silent_rows}-{rank}.safetensors")

    run = make(folder, "bad", reward=bad_on_the_second_process)
    run.train()
    write(folder, "bad", run)

    run = make(folder, "warm-up", critic="adapter", critic_warmup_steps=1, gradient_checkpointing=True)
    run.train()
    write(folder, "warm-up", run)

    for exchange in ("full", "powersgd", "projected"):
        low_rank = {"lowrank": "optimizer", "lowrank_rank": 4, "lowrank_all_reduce": exchange}
        low_rank |= {"lowrank_all_reduce_rank": 2} if exchange == "powersgd" else {}
        reward = score if exchange == "powersgd" else bad_on_the_second_process  # it starts at step 10 of 16
        run = make(folder, exchange, lora=False, reward=reward, num_ppo_epochs=4, num_mini_batches=2, **low_rank)
        run.train()
        write(folder, exchange, run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
