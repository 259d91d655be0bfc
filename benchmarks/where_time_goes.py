"""Where the time and the memory of one of our PPO updates go, against the floor.

    python benchmarks/where_time_goes.py [--variant shared] [--model DIR] [--tokens 64] [--tiny]

The floor of a phase is the larger of two times: the FLOPs that it takes at least over the rate of a matrix product of a
chunk's size, and the bytes of weights and key-value cache that it moves at least over the rate of a copy, both rates
measured just before (benchmarks/speed/floor.py says what is counted). The first update is a warm-up, the second is
measured, the third is profiled; the profiler slows it down, so of the third only shares are of interest. The work is
that of benchmarks/vs_trl.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed.floor import Rates, Sizes, measure_rates, phase_costs
from speed.kinds import KINDS, seconds_by_kind
from speed.options import add_work_arguments, default_model, describe, parse, work_of, write_json
from speed.processes import describe_machine, pin
from speed.report import GIB
from speed.result import card, versions
from speed.run_ours import ClockedPPOTrainer, build
from speed.work import VARIANTS, Work
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STAGES = ("rollout", "score", "update")


def update(trainer: ClockedPPOTrainer, around: Callable[[str, Callable], Any]) -> Any:
    """One update; `around` is called with the name and the work of each stage. Returns the rollout."""
    rollout = around("rollout", trainer.rollout)
    experience = around("score", lambda: trainer.advantages(trainer.score(rollout)))
    around("update", lambda: trainer.update(experience))
    trainer.clock.end_update()
    return rollout


class Profiled:
    """Runs each stage under the profiler and keeps its seconds by kind."""

    def __init__(self, vocabulary: int, device: str) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.by_stage: dict[str, dict[str, float]] = {}

    def __call__(self, stage: str, work: Callable) -> Any:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device == "cuda" else [])
        with profile(activities=activities, record_shapes=True) as profiler:
            start = time.perf_counter()
            result = work()
            if self.device == "cuda":
                torch.cuda.synchronize()
            wall_s = time.perf_counter() - start
        events = (event for event in profiler.events() if event.device_type == DeviceType.CPU)
        self.by_stage[stage] = seconds_by_kind(events, self.vocabulary, wall_s, self.device)
        return result


def measure(work: Work, folder: Path) -> dict[str, Any]:
    """Floors, seconds, peaks, kinds and what lies in memory."""
    trainer = build(work, folder)
    update(trainer, lambda stage, run: run())
    rollout = update(trainer, lambda stage, run: run())
    measured = trainer.clock.updates[-1]
    profiled = Profiled(trainer.model.config.vocab_size, work.device)
    update(trainer, profiled)

    parameters = list(trainer.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    config = trainer.model.config
    sizes = Sizes.of(config, work.dtype, trained, work.lora_top_layers, work.settings["critic"])
    prompts, completions = rollout.lengths()
    width = max(prompt + answer for prompt, answer in zip(prompts, completions))
    dtype = torch.float32 if work.dtype == "float32" else torch.bfloat16
    rates = measure_rates(work.micro_batch * width, config.hidden_size, config.intermediate_size, dtype, work.device)
    costs = phase_costs(sizes, prompts, completions, work.ppo_epochs, work.micro_batch)
    stages = {
        name: {
            "seconds": measured["seconds"][name],
            "peak_bytes": measured["peak_bytes"][name],
            "flops": costs[name].flops,
            "bytes": costs[name].bytes,
            "floor_s": rates.floor_s(costs[name]),
        }
        for name in STAGES
    }
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    memory = {
        "frozen weights": sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad),
        "trained weights": sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        "optimizer state": sum(v.numel() * v.element_size() for v in states if isinstance(v, torch.Tensor)),
    }
    return {"rates": vars(rates), "stages": stages, "kinds": profiled.by_stage, "memory": memory}


def stages_table(stages: dict[str, dict[str, float]], rates: Rates) -> str:
    """A row a stage: seconds against both floors."""
    lines = [
        "| stage | seconds | GFLOP | these take, s | GB | these take, s | seconds over floor | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, stage in stages.items():
        times = (stage["flops"] / rates.flops_per_s, stage["bytes"] / rates.bytes_per_s)
        cells = (
            name,
            f"{stage['seconds']:.2f}",
            f"{stage['flops'] / 1e9:,.1f}",
            f"{times[0]:.2f}",
            f"{stage['bytes'] / 1e9:,.1f}",
            f"{times[1]:.2f}",
            f"{stage['seconds'] / stage['floor_s']:.1f}",
            f"{stage['peak_bytes'] / GIB:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kinds_table(kinds: dict[str, dict[str, float]]) -> str:
    """A row a kind of operation: its share of each stage."""
    totals = {stage: sum(found.values()) for stage, found in kinds.items()}
    heads = " | ".join(f"{stage}, {total:.2f} s" for stage, total in totals.items())
    lines = [f"| share of the profiled stage | {heads} |", "|---" * (len(kinds) + 1) + "|"]
    for kind in KINDS:
        cells = [f"{found[kind] / totals[stage]:.1%}" for stage, found in kinds.items()]
        lines.append("| " + " | ".join([kind, *cells]) + " |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=[name for name in VARIANTS if name != "ragged"], default="shared")
    add_work_arguments(parser)
    options = parse(parser, words)
    options.model = options.model or default_model()
    core = pin(None if options.core < 0 else options.core)
    if core is not None:
        torch.set_num_threads(1)
    work = work_of(options, options.variant, updates=2)
    machine = describe_machine(core)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(work, Path(folder))
    rates = Rates(**found["rates"])
    print(f"{machine['processor']}, core {'all' if core is None else core}; load {machine['load_before']:.1f} before")
    print(f"{options.variant}, {describe(work)}")
    print(f"matrix product {rates.flops_per_s / 1e9:.1f} GFLOP/s, copy {rates.bytes_per_s / 1e9:.1f} GB/s\n")
    print(f"{stages_table(found['stages'], rates)}\n\n{kinds_table(found['kinds'])}\n")
    held = (f"{name} {size / GIB:.3f} GiB" for name, size in found["memory"].items())
    print(f"in memory throughout: {', '.join(held)}")
    machine |= {"card": card(work.device), "versions": versions()}
    write_json(options.out, "where_time_goes.py", words, {"machine": machine, "work": work.summary(), **found})


if __name__ == "__main__":
    main()
