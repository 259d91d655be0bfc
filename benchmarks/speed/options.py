"""The command line that the speed benchmarks share. Standard library only."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from .processes import ROOT
from .report import WARM_UP
from .work import LORA_MODULES, VARIANTS, Work, random_prompts, sizes

TINY = {"model": "tiny", "dtype": "float32", "rows": 4, "prompt_tokens": 4, "tokens": 6, "micro_batch": 2}
TINY |= {"ppo_epochs": 2, "updates": 1, "pairs": 1, "lora_rank": 4, "core": -1}


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that make a `Work`."""
    parser.add_argument("--model", help="a transformers folder (default: SmolLM2-135M, made)")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers, seconds a run")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "nf4"], default="bfloat16", help="of the weights")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--core", type=int, default=0, help="the one core of every run; -1: all (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="prompts of a rollout (default: %(default)s)")
    parser.add_argument("--prompt_tokens", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens (default: %(default)s)")
    parser.add_argument("--ppo_epochs", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--micro_batch", type=int, default=8, help="rows (default: %(default)s)")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="has no effect in TRL 1.12")
    parser.add_argument("--lora_rank", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--lora_modules", nargs="+", default=list(LORA_MODULES))
    parser.add_argument("--ours", type=json.loads, default={}, metavar="JSON", help="further fields of our PPOConfig")
    parser.add_argument("--out", type=Path, help="JSON file to write")


def parse(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """The flags; --tiny changes defaults."""
    options = parser.parse_args(words)
    if options.tiny:
        parser.set_defaults(**{name: value for name, value in TINY.items() if hasattr(options, name)})
        options = parser.parse_args(words)
    if options.rows % options.micro_batch:
        parser.error(f"--micro_batch {options.micro_batch} does not divide --rows {options.rows}")
    return options


def work_of(options: argparse.Namespace, variant: str, updates: int) -> Work:
    """The work of a variant, warm-up included; a ragged one still lacks its stop token."""
    chosen = VARIANTS[variant]
    return Work(
        model=options.model,
        prompts=random_prompts(options.model, options.rows, options.prompt_tokens, chosen.ragged),
        response_tokens=options.tokens,
        dtype=options.dtype,
        device=options.device,
        updates=WARM_UP + updates,
        ppo_epochs=options.ppo_epochs,
        micro_batch=options.micro_batch,
        gradient_checkpointing=options.gradient_checkpointing,
        lora_rank=options.lora_rank,
        lora_modules=tuple(options.lora_modules),
        lora_top_layers=sizes(options.model)["num_hidden_layers"] // 2 if chosen.top_half else None,
        settings={"critic": chosen.critic, **options.ours},
    )


def describe(work: Work) -> str:
    """The work in a line."""
    ending = "exactly" if work.stop_token_id is None else "up to"
    layers = "all layers" if work.lora_top_layers is None else f"the top {work.lora_top_layers} layers"
    checkpointing = "on" if work.gradient_checkpointing else "off"
    return (
        f"{Path(work.model).name}, {work.dtype}: {len(work.prompts)} prompts, {ending} {work.response_tokens} response "
        f"tokens, {work.ppo_epochs} PPO epochs, micro-batch {work.micro_batch}, LoRA of rank {work.lora_rank} on "
        f"{layers}, gradient checkpointing {checkpointing}"
    )


def default_model() -> str:
    """SmolLM2-135M as a folder, made when it is not there."""
    command = [sys.executable, str(ROOT / "benchmarks/get_smollm2.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("there is no model, the message is above; name a folder by --model")
    return done.stdout.splitlines()[-1]


def command_line(script: str, words: list[str] | None = None) -> list[str]:
    """The command that gave a result. Folders in it are this machine's own: their names alone are kept."""
    given = sys.argv[1:] if words is None else words
    return ["python", f"benchmarks/{script}", *(Path(word).name if word.startswith("/") else word for word in given)]


def write_json(path: Path | None, script: str, words: list[str] | None, found: dict) -> None:
    """The results and the command that gave them."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command_line(script, words), **found}, indent=1) + "\n")
