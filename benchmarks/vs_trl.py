"""TRL 1.12's PPO trainer and ours on the same work, in turn.

    python benchmarks/vs_trl.py [--variant shared adapter top-half ragged] [--tokens 64] [--pairs 2] [--updates 2]
    python benchmarks/vs_trl.py --ablation [--variant shared]
    python benchmarks/vs_trl.py --sft
    python benchmarks/vs_trl.py --scaling --tokens 16

Without a mode: a comparison. The order is TRL, ours, ours, TRL, ...; every run is a process of its own, pinned to one
core (--core), TRL's in an environment of its own, which the first call makes with pip in the user's cache
(--trl_python names one instead). Both sides: the same folder (--model; without it benchmarks/get_smollm2.py writes
SmolLM2-135M), the same prompts of random tokens in every rollout, exactly --tokens response tokens, the same LoRA on
the policy, PPO epochs, micro-batch, weights' type and gradient checkpointing. The first update of each process is left
out as warm-up. `top-half`: LoRA on the upper half of the layers, on both sides. `ragged`: prompts of a quarter to seven
quarters of the length, and a stop token that ends the base model's answers at half of --tokens on average, chosen from
a sample of it.

--ablation: ours alone; each switch changed by itself between two runs with all at their defaults. --sft: the peak
memory of PPO over that of the same module under a cross-entropy loss. --scaling: ours with 8 times the prompts, and
with 8 times the response tokens, over once each. --tiny: a random model of two layers; it shows
that the script works, no more.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from speed import report
from speed.options import add_work_arguments, default_model, describe, parse, work_of, write_json
from speed.processes import Sides, describe_machine, interleaved, make_trl_environment, pin
from speed.work import NEEDS_EARLY_ENDS, NEEDS_FROZEN_LAYERS, SWITCHES, VARIANTS, Work

from trl_alpharl.builtin.cache import default_root

NAMES = {"trl": "TRL 1.12", "ours": "ours", "sft": "cross-entropy"}


def parse_flags(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--ablation", action="store_true", help="our switches, one changed at a time")
    parser.add_argument(
        "--switch", nargs="+", choices=SWITCHES, default=list(SWITCHES), help="of --ablation; default all"
    )
    mode.add_argument("--sft", action="store_true", help="PPO's peak memory over supervised fine-tuning's")
    mode.add_argument("--scaling", action="store_true", help="ours with 8 times the prompts, and 8 times the tokens")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["shared"])
    parser.add_argument("--sides", choices=["both", "ours", "trl"], default="both")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each side (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=2, help="measured updates a run (default: %(default)s)")
    add_work_arguments(parser)
    parser.add_argument("--trl_micro_batch", type=int, help="rows, for TRL alone (default: as --micro_batch)")
    parser.add_argument("--trl_python", help="interpreter of an environment with TRL 1.12 (default: made)")
    parser.add_argument("--trl_path", help="a folder with TRL 1.12, to be run by our own interpreter instead")
    options = parse(parser, words)
    if min(options.pairs, options.updates) < 1:
        parser.error("--pairs and --updates must be at least 1")
    return options


def prepared(options: argparse.Namespace, sides: Sides, variant: str) -> Work:
    """The work of a variant, with the stop token of a ragged one."""
    work = work_of(options, variant, options.updates)
    if VARIANTS[variant].ragged:
        work = replace(work, stop_token_id=sides.run("ending", work)["stop_token_id"])
    return work


def compare(options: argparse.Namespace, sides: Sides, variant: str) -> dict[str, Any]:
    """All runs of one variant, printed as they come, and their ratios."""
    work = prepared(options, sides, variant)
    runs = []
    order = interleaved("trl", "ours", options.pairs)
    for number, side in enumerate(side for side in order if options.sides in ("both", side)):
        own = replace(work, seed=number // 2)
        if side == "trl":
            own = replace(own, micro_batch=options.trl_micro_batch or own.micro_batch)
        runs.append(report.figures(sides.run(side, own), own))
        say(runs[-1])
    found = report.ratios(runs, "trl", "ours")
    print(f"\n### {variant}, {describe(work)}\n")
    print(report.runs_table(runs, NAMES))
    print("\n" + "\n".join(f"- {line}" for line in report.ratio_lines(found, work.device == "cpu")), flush=True)
    return {"variant": variant, "work": work.summary(), "runs": runs, "ratios": found}


def ablation(options: argparse.Namespace, sides: Sides, variant: str) -> dict[str, Any]:
    """Ours with one switch changed at a time, between two runs with none."""
    work = prepared(options, sides, variant)
    without_effect = set(NEEDS_FROZEN_LAYERS if work.lora_top_layers is None else ())
    without_effect |= set(NEEDS_EARLY_ENDS if work.stop_token_id is None else ())
    arms: list[tuple[str, dict[str, Any]]] = [("default", {})]
    arms += [(name, SWITCHES[name]) for name in options.switch if not without_effect & SWITCHES[name].keys()]
    runs = []
    for name, change in [*arms, ("default", {})]:
        own = replace(work, settings={**work.settings, **change})
        runs.append({**report.figures(sides.run("ours", own), own), "side": name, "change": change})
        say(runs[-1])
    print(f"\n### switches, {variant}, {describe(work)}\n\n{report.ablation_table(runs)}", flush=True)
    return {"ablation": variant, "work": work.summary(), "runs": runs}


def sft(options: argparse.Namespace, sides: Sides, variant: str) -> dict[str, Any]:
    """Peaks of PPO and of a cross-entropy loss on the same module."""
    work = work_of(options, variant, options.updates)
    runs = []
    for side in interleaved("sft", "ours", options.pairs):
        runs.append(report.figures(sides.run(side, work), work))
        say(runs[-1])
    found = report.ratios(runs, "sft", "ours")["peak_bytes"]
    print(f"\n### PPO over supervised fine-tuning, {variant}, {describe(work)}\n\n{report.peaks_table(runs, NAMES)}")
    print(f"\n- peak memory, PPO over cross-entropy: {report.spread(found)}", flush=True)
    return {"sft": variant, "work": work.summary(), "runs": runs, "ratios": {"peak_bytes": found}}


def scaling(options: argparse.Namespace, sides: Sides, variant: str) -> dict[str, Any]:
    """Ours with 8 times as much of one thing, between two runs without."""
    work = prepared(options, sides, variant)
    arms = {
        "once": work,
        "8 x prompts": replace(work, prompts=work.prompts * 8),
        "8 x response tokens": replace(work, response_tokens=work.response_tokens * 8),
    }
    runs = []
    for name in [*arms, "once"]:
        runs.append({**report.figures(sides.run("ours", arms[name]), arms[name]), "side": name})
        say(runs[-1])
    print(f"\n### 8 times as much, {variant}, {describe(work)}\n\n{report.scaling_table(runs)}", flush=True)
    return {"scaling": variant, "work": work.summary(), "runs": runs}


def say(run: dict[str, Any]) -> None:
    """One line a run, for who waits."""
    rest = run.get("failed") or f"{run['tokens_per_s']:.1f} tokens/s, {run['peak_bytes'] / report.GIB:.2f} GiB"
    print(f"{run['side']}: {rest}", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> None:
    """Run what the flags say, print tables, write JSON."""
    options = parse_flags(words)
    options.model = options.model or default_model()
    mode = ablation if options.ablation else sft if options.sft else scaling if options.scaling else compare
    ours_alone = mode is not compare or options.sides == "ours"
    if not ours_alone and options.trl_python is None and options.trl_path is None:
        options.trl_python = make_trl_environment(default_root() / "trl-1.12")
    core = pin(None if options.core < 0 else options.core)
    sides = Sides(options.trl_python, options.trl_path, core)
    machine = describe_machine(core)
    print(f"{machine['processor']}, core {'all' if core is None else core}; load {machine['load_before']:.1f} before")
    if not ours_alone:
        print(report.DIFFERENCES)
    found: dict[str, Any] = {"machine": machine, "differences": report.DIFFERENCES, "results": []}
    for variant in options.variant:
        found["results"].append(mode(options, sides, variant))
        write_json(options.out, "vs_trl.py", words, found)


if __name__ == "__main__":
    main()
