"""Whether what holds on the small tasks holds on SmolLM2-135M: a tuned PPO against ARPO's preset `tuned`.

    python benchmarks/confirm_smollm2.py [--model FOLDER] [--short] [--out FILE]

The reward is 1 for an answer that VADER calls positive (compound score of .5 or more) and 0 for any other, so it is
verifiable. PPO runs at 4 points (learning rate x KL coefficient) on one seed, 15 updates of 16 completions of up to 32
tokens; the best of them, and the preset as it is at that one's learning rate and KL coefficient, then run on 3 fresh
seeds.

The last 32 prompts are kept out of the training. Every run answers them before it and after each rollout; these
answers, drawn alike each time, are the score, KL and entropy that are reported, so that a curriculum, which chooses
what is trained on, changes nothing of how an arm is measured. LoRA sits on the upper layers alone, and prompts have an
empty system turn: both for speed.

A run that the results file already holds is not run again. --model: default, what get_smollm2.py makes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from study import report
from study.arms import BEST
from study.bridge import measured
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_alpharl import ARPOConfig, ARPOTrainer
from trl_alpharl.rewards.sentiment import vader_sentiment

PROMPTS = Path(__file__).parents[1] / "recipes/sentiment/prompts.jsonl"
POSITIVE = 0.5
TUNING_SEED, FRESH_SEEDS = 0, (100, 101, 102)
POINTS = {
    f"PPO learning_rate={rate:g} kl_coef={beta:g}": {"learning_rate": rate, "kl_coef": beta}
    for rate in (1e-3, 3e-4)
    for beta in (0.008, 0.05)
}
ROLLOUTS, ROWS, HELD_OUT, TOP_LAYERS = 15, 16, 32, 8
PPO = {"preset": "ppo", "num_mini_batches": 2}
ARPO = "tuned"
TUNED = {"preset": "tuned", "reward_kind": "verifiable"}

Settings = dict[str, Any]


def sounds_positive(completions: list, **kwargs: Any) -> list[float]:
    """1 where VADER's compound score is `POSITIVE` or more, else 0."""
    return [float(score >= POSITIVE) for score in vader_sentiment(completions)]


def best_point(runs: list[Settings]) -> str:
    """The PPO with the highest final score on the tuning seed."""
    tuned = {run["arm"]: report.final_score(curves(run)) for run in runs if run["arm"] in POINTS}
    return max(tuned, key=tuned.get)


def plan(runs: list[Settings]) -> list[tuple[str, Settings, int]]:
    """What is still to run: (arm, settings, seed). The comparison follows once the points are there."""
    wanted = [(arm, {**PPO, **point}, TUNING_SEED) for arm, point in POINTS.items()]
    held = {(run["arm"], run["seed"]) for run in runs}
    if all((arm, seed) in held for arm, _, seed in wanted):
        best = POINTS[best_point(runs)]
        arms = {BEST: {**PPO, **best}, ARPO: {**TUNED, **best}}
        wanted += [(arm, settings, seed) for seed in FRESH_SEEDS for arm, settings in arms.items()]
    return [one for one in wanted if (one[0], one[2]) not in held]


def prompts() -> tuple[Dataset, Dataset]:
    """The sentiment recipe's questions, each after an empty system turn (the template's own takes 16 tokens): what is
    trained on, and what is held out."""
    questions = (json.loads(line) for line in PROMPTS.read_text().splitlines())
    rows = [{"prompt": [{"role": "system", "content": ""}, *row["prompt"]]} for row in questions]
    return Dataset.from_list(rows[:-HELD_OUT]), Dataset.from_list(rows[-HELD_OUT:])


def run(model: Any, tokenizer: Any, settings: Settings, seed: int, rollouts: int = ROLLOUTS) -> list[Settings]:
    """One run: episodes, and the held-out prompts' mean score, KL and entropy, before it and after each rollout."""
    trained_on, held_out = prompts()
    with tempfile.TemporaryDirectory() as folder:
        args = ARPOConfig(
            output_dir=folder,
            seed=seed,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            num_sample_generations=0,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=HELD_OUT,
            response_length=32,
            total_episodes=rollouts * ROWS,
            num_ppo_epochs=2,
            temperature=1.0,
            vf_coef=0.1,
            lr_scheduler_type="constant",
            lora_top_layers=TOP_LAYERS,
            **settings,
        )
        every = args.steps_per_rollout
        trainer = ARPOTrainer(
            args=replace(args, eval_strategy="steps", eval_steps=every, logging_steps=every),
            model=model,
            processing_class=tokenizer,
            train_dataset=trained_on,
            eval_dataset=held_out,
            reward_funcs=sounds_positive,
            peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
        )
        return measured(trainer)


def curves(run: Settings) -> np.ndarray:
    """A run as the report reads it: (evaluations, 3) episodes, score, KL."""
    return np.array([[row[name] for name in ("episodes", "score", "kl")] for row in run["rows"]])


def table(runs: list[Settings]) -> str:
    """The tuning points' final scores, and the study's table of the arms on fresh seeds."""
    data: dict[tuple[str, str], report.Curves] = {}
    for one in runs:
        data.setdefault(("smollm2", one["arm"]), {})[one["seed"]] = curves(one)
    points = [
        f"{arm}, seed {TUNING_SEED}: final {report.final_score(data['smollm2', arm][TUNING_SEED]):.3f}, "
        f"KL {report.final_kl(data['smollm2', arm][TUNING_SEED]):.1f}"
        for arm in POINTS
    ]
    return "\n".join([report.task_table("smollm2", data), "", *points])


def main() -> None:
    """Run what is missing, write every run as it ends, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="SmolLM2's folder; default: made by get_smollm2.py")
    parser.add_argument("--short", action="store_true", help="two rollouts a run: a look, not a figure")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/confirm_smollm2.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is None:
        from get_smollm2 import get_smollm2

        options.model = str(get_smollm2())
    runs = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
    while missing := plan(runs):
        arm, settings, seed = missing[0]
        start = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(options.model)
        rows = run(model, tokenizer, settings, seed, 2 if options.short else ROLLOUTS)
        runs.append({"arm": arm, "seed": seed, "settings": settings, "rows": rows})
        record = {"weights": "SmolLM2-135M-Instruct, Q4_1 dequantised", "versions": versions, "runs": runs}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(unfinished, options.out)
        final, seconds = report.final_score(curves(runs[-1])), time.monotonic() - start
        print(f"{arm}, seed {seed}: {seconds:.0f} s, final {final:.3f}", file=sys.stderr)
    print(table(runs))


if __name__ == "__main__":
    main()
