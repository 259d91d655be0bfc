"""Low-rank optimizers inside PPO: every arm with equally swept learning rates, score and entropy against episodes.

    python benchmarks/lowrank_rl.py tiny  [--short] [--arms A ...] [--out FILE]
    python benchmarks/lowrank_rl.py smollm2 --model DIR [--short] [--arms A ...] [--out FILE]

tiny     full-parameter PPO on the embedded model, the quickstart's task: the whole grid of arms x learning rates x 3
         seeds.
smollm2  the top layers and the critic of SmolLM2-135M with full parameters: four arms, 2 learning rates x 1 seed, then
3
         seeds at the better one, 12 updates.

A run that the results file already holds is not run again, so that a sweep can be stopped and continued. Gradient +
state bytes are the most that were held at once. Step seconds depend on the machine; the table gives them over AdamW's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from speed.options import command_line
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_alpharl import PPOConfig, PPOTrainer
from trl_alpharl.builtin import builtin_dataset, load_builtin
from trl_alpharl.lowrank.optimizer import LowRankAdamW
from trl_alpharl.rewards import get_reward


class Arm(NamedTuple):
    """Fields of PPOConfig, and what the arm's learning rates are multiplied by so that all sweeps are centred alike."""

    fields: dict[str, Any]
    rate: float = 1.0


def optimizer(rank: int, **changes: Any) -> dict[str, Any]:
    """`lowrank: optimizer` at a rank."""
    return {"lowrank": "optimizer", "lowrank_rank": rank, **{f"lowrank_{k}": v for k, v in changes.items()}}


TANH = {"rank_policy": "tanh", "tanh_base": 8, "tanh_delta": 24, "tanh_tau": 100.0}
ARMS = {
    "adamw": Arm({"optim": "adamw_torch"}),
    "adamw 8-bit": Arm({"optim": "adamw_bnb_8bit"}),
    "lowrank k=8": Arm(optimizer(8), 3.0),
    "lowrank k=16": Arm(optimizer(16), 3.0),
    "lowrank k=32": Arm(optimizer(32), 3.0),
    "lowrank tanh 8-32": Arm(optimizer(8, **TANH), 3.0),
    "scaled k=8": Arm(optimizer(8, update="scaled", refresh="random")),
    "callback k=16": Arm({"optim": "adamw_torch", "lowrank": "callback", "lowrank_rank": 16}),
    "lowrank k=64": Arm(optimizer(64), 3.0),
    "scaled k=16": Arm(optimizer(16, update="scaled", refresh="random")),
}
TINY_ARMS = [name for name in ARMS if name not in ("lowrank k=64", "scaled k=16")]
SMOLLM2_ARMS = ["adamw", "adamw 8-bit", "lowrank k=64", "scaled k=16"]
TINY = {
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "response_length": 24,
    "temperature": 1.0,
    "num_ppo_epochs": 4,
    "num_mini_batches": 2,
    "kl_coef": 0.1,
    "total_episodes": 2560,
}
SMOLLM2 = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "response_length": 32,
    "temperature": 0.7,
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "kl_coef": 0.05,
    "total_episodes": 12 * 16,
}
TOP_LAYERS = 4
REWARDS = {"tiny": "positive_words", "smollm2": "vader_sentiment"}


class Meter(TrainerCallback):
    """The most bytes of gradient and optimizer state, and the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, model=None, **kwargs):
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, LowRankAdamW):
            held = inner.gradient_bytes() + inner.state_bytes()
        else:
            held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            tensors = (value for entry in inner.state.values() for value in entry.values())
            held += sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
        self.bytes = max(self.bytes, held)
        self.start = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def run(task: str, folder: str | None, arm: str, rate: float, seed: int, short: bool) -> dict[str, Any]:
    """One run: its curve and its measurements."""
    tiny = task == "tiny"
    model, tokenizer, rows = tiny_task() if tiny else smollm2_task(folder)
    sizes = TINY if tiny else SMOLLM2
    chosen = {
        **sizes,
        "total_episodes": 2 * sizes["per_device_train_batch_size"] * sizes["gradient_accumulation_steps"],
    }
    meter = Meter()
    with tempfile.TemporaryDirectory() as output:
        args = PPOConfig(
            output_dir=output,
            seed=seed,
            learning_rate=rate * ARMS[arm].rate,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            num_sample_generations=0,
            logging_steps=sizes["num_ppo_epochs"] * sizes["num_mini_batches"],
            **(chosen if short else sizes),
            **ARMS[arm].fields,
        )
        trainer = PPOTrainer(
            args=args,
            model=model,
            processing_class=tokenizer,
            train_dataset=rows,
            reward_funcs=get_reward(REWARDS[task]),
            callbacks=[meter],
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    last = logs[-max(1, len(logs) // 4) :]
    return {
        "task": task,
        "arm": arm,
        "rate": rate,
        "learning_rate": args.learning_rate,
        "seed": seed,
        "score": statistics.fmean(log["objective/scores"] for log in last),
        "entropy": statistics.fmean(log["policy/entropy_avg"] for log in last),
        "kl": statistics.fmean(log["objective/kl"] for log in last),
        "gradient_and_state_bytes": meter.bytes,
        "step_s": statistics.median(meter.seconds),
        "curve": [
            [log["episode"], round(log["objective/scores"], 4), round(log["policy/entropy_avg"], 4)] for log in logs
        ],
    }


def tiny_task() -> tuple[Any, Any, Any]:
    """The embedded model and its prompts."""
    model, tokenizer = load_builtin()
    return model, tokenizer, builtin_dataset()[0]


def smollm2_task(folder: str | None) -> tuple[Any, Any, Any]:
    """SmolLM2 with its lower layers frozen, and the sentiment recipe's prompts."""
    if folder is None:
        from get_smollm2 import get_smollm2

        folder = str(get_smollm2(dtype="float32"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    top = [f"layers.{number}." for number in range(model.config.num_hidden_layers)][-TOP_LAYERS:]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(layer in name for layer in top) or name == "model.norm.weight")
    prompts = Path(__file__).parents[1] / "recipes/sentiment/prompts.jsonl"
    # An empty system turn: the template's own takes 16 tokens.
    turns = [
        [{"role": "system", "content": ""}, *json.loads(line)["prompt"]] for line in prompts.read_text().splitlines()
    ]
    return model, AutoTokenizer.from_pretrained(folder), Dataset.from_dict({"prompt": turns})


def plan(task: str, arms: list[str], done: list[dict[str, Any]], short: bool) -> list[tuple[str, float, int]]:
    """Runs that are still to do: (arm, rate, seed). For smollm2 the last two seeds follow once the rates are known."""
    if short:
        runs = [(arm, 3e-4 if task == "tiny" else 3e-5, 0) for arm in arms]
    elif task == "tiny":
        runs = [(arm, rate, seed) for seed in range(3) for arm in arms for rate in (1e-4, 3e-4, 1e-3)]
    else:
        runs = [(arm, rate, 0) for arm in arms for rate in (1e-4, 3e-4)]
        for arm in arms:
            first = [row for row in done if row["arm"] == arm and row["seed"] == 0]
            if len(first) == 2:
                best = max(first, key=lambda row: row["score"])["rate"]
                runs += [(arm, best, seed) for seed in (1, 2)]
    held = {(row["arm"], row["rate"], row["seed"]) for row in done}
    return [one for one in runs if one not in held]


def table(rows: list[dict[str, Any]]) -> str:
    """Each arm at its best learning rate: mean score and spread over seeds, entropy, KL, bytes, step time over
    AdamW's."""
    lines = [
        "| arm | learning rate | seeds | score | entropy | KL | gradient + state | step over AdamW |",
        "|" + "---|" * 8,
    ]
    steps = [row["step_s"] for row in rows if row["arm"] == "adamw"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_rate: dict[float, list[dict[str, Any]]] = {}
        for row in rows:
            if row["arm"] == arm:
                by_rate.setdefault(row["rate"], []).append(row)
        most = max(map(len, by_rate.values()))
        best = max((found for found in by_rate.values() if len(found) == most), key=lambda f: _mean(f, "score"))
        scores = [row["score"] for row in best]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        ratio = f"{_mean(best, 'step_s') / statistics.fmean(steps):.2f}" if steps else "-"
        cells = (
            arm,
            f"{best[0]['learning_rate']:.1e}",
            len(best),
            f"{_mean(best, 'score'):.2f}{spread}",
            f"{_mean(best, 'entropy'):.2f}",
            f"{_mean(best, 'kl'):.2f}",
            f"{best[0]['gradient_and_state_bytes'] / 1e6:.1f} MB",
            ratio,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def main() -> None:
    """Run what is missing, print the table, write every run as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["tiny", "smollm2"])
    parser.add_argument("--model", help="SmolLM2's folder; default: made by get_smollm2.py")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS))
    parser.add_argument("--short", action="store_true", help="two rollouts, one rate, one seed: a look, not a figure")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/lowrank_rl_<task>.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = options.arms or (TINY_ARMS if options.task == "tiny" else SMOLLM2_ARMS)
    out = options.out or Path(f"benchmarks/results/lowrank_rl_{options.task}.json")
    rows = json.loads(out.read_text())["runs"] if out.is_file() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "bitsandbytes")}
    command = " ".join(command_line("lowrank_rl.py"))
    while missing := plan(options.task, arms, rows, options.short):
        for arm, rate, seed in missing:
            rows.append(run(options.task, options.model, arm, rate, seed, options.short))
            print(f"{arm}, rate {rate:g}, seed {seed}: score {rows[-1]['score']:.3f}", file=sys.stderr, flush=True)
            record = {"command": command, "versions": versions, "short": options.short, "runs": rows}
            out.write_text(json.dumps(record) + "\n")
    print(f"{table(rows)}\n\n{command}\n{versions}")


if __name__ == "__main__":
    main()
