"""Results of the sides as figures and Markdown tables. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .work import PHASES, Work

GIB = 2**30
WARM_UP = 1  # updates that are not measured
DIFFERENCES = (
    "Not the same on both sides: TRL 1.12 trains every weight of a second model as its critic (a sequence classifier "
    "of the same shape); ours is a value head on the policy's trunk, or a LoRA adapter with a head. The reward, the "
    "last token's id modulo 7, is a module without layers for TRL and a Python function for ours, which also decodes "
    "the texts."
)


def figures(result: dict[str, Any], work: Work) -> dict[str, Any]:
    """What one process measured: per update and phase, warm-up left out; the peak over all of it.

    Raises SystemExit where completions of a fixed length have another.
    """
    if "failed" in result:
        return {"side": result["side"], "failed": result["failed"]}
    updates = result["updates"][WARM_UP:]
    expected = len(work.prompts) * work.response_tokens
    if work.stop_token_id is None and any(update["tokens"] != expected for update in updates):
        raise SystemExit(f"{result['side']}: an update has other than {expected} response tokens: not the same work.")
    tokens = sum(update["tokens"] for update in updates)
    seconds, cpu_seconds = (
        {phase: statistics.fmean(update[name][phase] for update in updates) for phase in PHASES}
        for name in ("seconds", "cpu_seconds")
    )
    peaks = {phase: max(update["peak_bytes"][phase] for update in result["updates"]) for phase in PHASES}
    return {
        "side": result["side"],
        "updates": len(updates),
        "phase_s": seconds,
        "phase_peak_bytes": peaks,
        "peak_bytes": max(peaks.values()),
        "tokens_per_s": tokens / len(updates) / sum(seconds.values()),
        "tokens_per_cpu_s": tokens / len(updates) / sum(cpu_seconds.values()),
        "mean_response_tokens": tokens / len(updates) / len(work.prompts),
        "versions": result["versions"],
        "card": result["card"],
    }


def ratios(runs: Sequence[dict[str, Any]], first: str, second: str) -> dict[str, list[float]]:
    """`second` over `first`, one number a pair of runs that stand side by side; empty where one of them failed."""
    found: dict[str, list[float]] = {"tokens_per_s": [], "tokens_per_cpu_s": [], "peak_bytes": []}
    for start in range(0, len(runs) - 1, 2):
        pair = {run["side"]: run for run in runs[start : start + 2]}
        if pair.keys() == {first, second} and not any("failed" in run for run in pair.values()):
            for name, numbers in found.items():
                numbers.append(pair[second][name] / pair[first][name])
    return found


def spread(numbers: Sequence[float], form: str = "{:.2f}") -> str:
    """The mean, and the least and the greatest in brackets."""
    if not numbers:
        return "-"
    low, middle, high = (form.format(n) for n in (min(numbers), statistics.fmean(numbers), max(numbers)))
    return middle if len(numbers) == 1 else f"{middle} ({low} to {high})"


def runs_table(runs: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
    """A row a side (or an arm): means over its runs."""
    lines = [
        "| | runs x updates | rollout, s | score, s | update, s | rest, s | response tokens/s | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for side in dict.fromkeys(run["side"] for run in runs):
        own = [run for run in runs if run["side"] == side]
        failed = [run["failed"] for run in own if "failed" in run]
        if failed:
            lines.append(f"| {names.get(side, side)} | {failed[0]} " + "| - " * 6 + "|")
            continue
        cells = [names.get(side, side), f"{len(own)} x {own[0]['updates']}"]
        cells += [f"{statistics.fmean(run['phase_s'][phase] for run in own):.2f}" for phase in PHASES]
        cells.append(spread([run["tokens_per_s"] for run in own], "{:.1f}"))
        cells.append(spread([run["peak_bytes"] / GIB for run in own]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peaks_table(runs: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
    """Peak memory by phase, a row a side: the greatest of its runs."""
    lines = [f"| peak, GiB | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for side in dict.fromkeys(run["side"] for run in runs):
        own = [run["phase_peak_bytes"] for run in runs if run["side"] == side]
        cells = [f"{max(peaks[phase] for peaks in own) / GIB:.2f}" for phase in PHASES]
        lines.append("| " + " | ".join([names.get(side, side), *cells]) + " |")
    return "\n".join(lines)


def ratio_lines(found: dict[str, list[float]], cpu: bool) -> list[str]:
    """The ratios in words; `cpu`: also by processor seconds, which other work on the machine disturbs less."""
    pairs = len(found["tokens_per_s"])
    if not pairs:
        return ["no ratio: a side is missing"]
    unit = "pair" if pairs == 1 else "pairs"
    lines = [f"response tokens/s, ours over TRL: {spread(found['tokens_per_s'])}, {pairs} {unit} of runs"]
    if cpu:
        lines.append(f"the same by processor seconds: {spread(found['tokens_per_cpu_s'])}")
    return [*lines, f"peak memory, ours over TRL: {spread(found['peak_bytes'])}"]


def ablation_table(runs: Sequence[dict[str, Any]]) -> str:
    """A row a switch: its speed and memory over the mean of the runs with every switch at its default."""
    base = [run for run in runs if run["side"] == "default"]
    speed, peak = (statistics.fmean(run[name] for run in base) for name in ("tokens_per_s", "peak_bytes"))
    noise = [run["tokens_per_s"] / speed for run in base]
    lines = [
        "| one change | response tokens/s | over default | peak memory, GiB | over default |",
        "|---|---|---|---|---|",
        f"| none ({len(base)} runs) | {speed:.1f} | {spread(noise)} | {peak / GIB:.2f} | 1.00 |",
    ]
    for run in runs:
        if run["side"] != "default":
            found = (
                run["tokens_per_s"],
                run["tokens_per_s"] / speed,
                run["peak_bytes"] / GIB,
                run["peak_bytes"] / peak,
            )
            cells = [f"{found[0]:.1f}", *(f"{number:.2f}" for number in found[1:])]
            lines.append("| " + " | ".join([run["side"], *cells]) + " |")
    return "\n".join(lines)


def scaling_table(runs: Sequence[dict[str, Any]]) -> str:
    """A row an arm: its seconds an update and its peak over the mean of the runs with once as much, by phase too."""
    base = [run for run in runs if run["side"] == "once"]
    lines = [
        "| | rollout, s | score, s | update, s | all, s | over once | peak memory, GiB | over once |",
        "|" + "---|" * 8,
    ]
    peak = statistics.fmean(run["peak_bytes"] for run in base)
    whole = statistics.fmean(sum(run["phase_s"].values()) for run in base)
    for run in runs:
        seconds = sum(run["phase_s"].values())
        cells = [run["side"], *(f"{run['phase_s'][phase]:.2f}" for phase in PHASES[:-1]), f"{seconds:.2f}"]
        cells += [f"{seconds / whole:.2f}", f"{run['peak_bytes'] / GIB:.2f}", f"{run['peak_bytes'] / peak:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
