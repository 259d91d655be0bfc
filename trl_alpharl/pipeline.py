"""From a checked recipe to a trained model: the command line's work, for scripts too.

recipe = load_recipe("quickstart/ppo_tiny", ["--seed", "1"])
measured = run(build(recipe))
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from ._trl import ModelConfig, get_peft_config, get_quantization_config
from .knobs import ScriptKnobs
from .recipe import Recipe
from .trainers import inputs
from .trainers.arpo_config import ARPOConfig
from .trainers.arpo_trainer import ARPOTrainer
from .trainers.checkpoints import check_resumable
from .trainers.notices import RepairedFieldWarning
from .trainers.ppo_config import PPOConfig
from .trainers.ppo_trainer import PPOTrainer
from .trainers.progress import RunProgress

BUILTIN = "builtin"
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
METHODS = {"ppo": (PPOConfig, PPOTrainer), "arpo": (ARPOConfig, ARPOTrainer)}


@dataclass(frozen=True)
class Run:
    """A trainer, its held-out rows and the script's fields."""

    trainer: PPOTrainer
    held_out: Any
    script: ScriptKnobs


def build(recipe: Recipe) -> Run:
    """Make everything that a recipe names. The policy, which takes longest, loads when the rest has been checked."""
    script = ScriptKnobs(**recipe.section("script"))
    config_class, trainer_class = METHODS[script.method]
    args = config_class(**recipe.section("ppo"), **recipe.section("arpo"))
    model_args = ModelConfig(**recipe.section("model"))
    names = [*(script.reward_funcs or []), *([args.reward_model_path] if args.reward_model_path else [])]
    if not names:
        raise ValueError("reward_funcs: missing; name a reward, or a classifier in reward_model_path.")
    peft_config = lora_config(model_args)
    inputs.check_roles(model_args.model_name_or_path or args.sft_model_path, None, None, args.critic, peft_config)
    check_resume(args)
    train, held_out = load_prompts(script, args.seed)
    rewards = inputs.list_rewards(names, None, args.reward_weights)
    model, tokenizer = load_model(model_args, args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RepairedFieldWarning)  # for scripts from TRL 1.12; a recipe is none
        trainer = trainer_class(
            args=args,
            processing_class=tokenizer,
            model=model,
            train_dataset=train,
            eval_dataset=held_out,
            peft_config=peft_config,
            reward_funcs=rewards,
        )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(RunProgress)
    return Run(trainer, held_out, script)


def run(prepared: Run) -> dict[str, Any]:
    """Score held-out prompts, train, score them again, save the model. Returns what was measured."""
    trainer = prepared.trainer
    before = trainer.score_dataset(prepared.held_out)
    start = time.time()
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    seconds = time.time() - start
    after = trainer.score_dataset(prepared.held_out)
    trainer.save_model()
    history = trainer.state.log_history
    shown = zip(before, after, range(prepared.script.sample_rows))
    return {
        **_score("score_before", before),
        **_score("score_after", after),
        "kl": _last(history, "objective/kl"),
        "entropy": _last(history, "objective/entropy"),
        "seconds": seconds,
        "response_tokens_per_s": _mean(history, "response_tokens_per_s"),
        "rows": [
            {
                "prompt": old["query"],
                "before": old["model response"],
                "after": new["model response"],
                "score_before": old["score"],
                "score_after": new["score"],
            }
            for old, new, _ in shown
        ],
        "output_dir": trainer.args.output_dir,
        "log_history": history,
    }


def check_resume(args: PPOConfig) -> None:
    """Raise ValueError when the checkpoint to go on from is missing, damaged or another kind of run's."""
    place = args.resume_from_checkpoint
    if not place:
        return
    if place is True:
        folder = Path(args.output_dir)
        place = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if place is None:
            raise ValueError(f"resume_from_checkpoint is true, but {folder} holds no checkpoint.")
    if not Path(place).is_dir():
        raise ValueError(f"resume_from_checkpoint: there is no folder {place}.")
    check_resumable(Path(place), args, args.critic)


def load_prompts(script: ScriptKnobs, seed: int) -> tuple[Any, Any]:
    """Rows to train on and rows held out for the scores."""
    name = script.dataset_name
    if name is None:
        raise ValueError("dataset_name: missing; name a hub dataset, a file with a `prompt` column, or 'builtin'.")
    if name == BUILTIN:
        from .builtin import builtin_dataset

        return builtin_dataset()
    from datasets import load_dataset

    path = Path(name)
    if path.suffix in FILE_FORMATS:
        if not path.is_file():
            raise ValueError(f"dataset_name: {name} does not exist.")
        data = load_dataset(FILE_FORMATS[path.suffix], data_files=str(path))
    else:
        data = load_dataset(name, script.dataset_config)
    for field in ("dataset_train_split", "dataset_test_split"):
        split = getattr(script, field)
        if split is not None and split not in data:
            raise ValueError(f"{field} is {split!r}; {name} has {', '.join(data)}.")
    train = data[script.dataset_train_split]
    if not {"prompt", "input_ids"} & set(train.column_names):
        raise ValueError(f"dataset_name: {name} needs a `prompt` column; it has {', '.join(train.column_names)}.")
    if script.dataset_test_split is not None:
        return train, data[script.dataset_test_split]
    if len(train) <= script.eval_rows:
        raise ValueError(f"eval_rows is {script.eval_rows}, but {name} has {len(train)} rows in all.")
    split = train.train_test_split(test_size=script.eval_rows, seed=seed)
    return split["train"], split["test"]


def load_model(model_args: Any, args: PPOConfig) -> tuple[Any, Any]:
    """The policy and its tokenizer: the embedded one, a local folder or a hub id; quantized when asked."""
    name = model_args.model_name_or_path or args.sft_model_path
    if name is None:
        raise ValueError("model_name_or_path: missing; name a hub id, a folder, or 'builtin'.")
    if name == BUILTIN:
        if model_args.load_in_4bit or model_args.load_in_8bit:
            raise ValueError(
                "load_in_4bit: the embedded model is too small to be worth quantizing; name another model."
            )
        from .builtin import load_builtin

        # A second thread gains the tiny model a fifth on idle cores and costs it tenfold beside other work (measured).
        torch.set_num_threads(1)
        return load_builtin()
    revision = model_args.model_revision
    if model_args.use_peft and inputs.is_adapter_folder(name):
        raise ValueError(f"use_peft: {name} is a saved adapter, which learns on; leave it out or name the base model.")
    model = inputs.load_causal_lm(
        name,
        "model_name_or_path",
        revision=revision,
        dtype=model_args.dtype,
        attn_implementation=model_args.attn_implementation,
        quantization_config=get_quantization_config(model_args),
    )
    return model, AutoTokenizer.from_pretrained(inputs.tokenizer_source(name), revision=revision)


def lora_config(model_args: Any) -> Any:
    """TRL's LoRA config. TRL turns a list of one module into a text; peft would read it as a pattern of full names."""
    config = get_peft_config(model_args)
    if config is not None and isinstance(config.target_modules, str) and config.target_modules != "all-linear":
        config.target_modules = {config.target_modules}
    return config


def _score(name: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    scores = [row["score"] for row in rows]
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return {name: statistics.fmean(scores), f"{name}_se": spread / math.sqrt(len(scores))}


def _last(history: list[dict[str, Any]], key: str) -> float:
    return next((log[key] for log in reversed(history) if key in log), math.nan)


def _mean(history: list[dict[str, Any]], key: str) -> float:
    values = [log[key] for log in history if key in log]
    return statistics.fmean(values) if values else math.nan
