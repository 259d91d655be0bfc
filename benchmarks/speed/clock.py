"""Seconds, processor seconds and peak memory by phase, by the same means on both sides."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .work import PHASES


class PhaseClock:
    """Every moment belongs to one phase: from `enter` to the next `enter`.

    `rest` is what lies between two updates (logging, fetching prompts) and counts to the update after it. `updates`
    holds a report of each: by phase `seconds`, `cpu_seconds` of this process and `peak_bytes`; and its response
    `tokens`.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.phase = "rest"
        self.updates: list[dict[str, Any]] = []
        self.tokens = 0
        self._report = _empty()
        reset_peak(device)
        self._since = self._now()

    def enter(self, phase: str) -> None:
        """The phase so far is over."""
        now, peak = self._now(), peak_bytes(self.device)
        for name, before, after in zip(("seconds", "cpu_seconds"), self._since, now):
            self._report[name][self.phase] += after - before
        self._report["peak_bytes"][self.phase] = max(self._report["peak_bytes"][self.phase], peak)
        reset_peak(self.device)
        self.phase, self._since = phase, now

    def end_update(self) -> None:
        """An update is over; what follows belongs to the next."""
        self.enter("rest")
        self.updates.append({**self._report, "tokens": self.tokens})
        self._report, self.tokens = _empty(), 0

    def _now(self) -> tuple[float, float]:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


def _empty() -> dict[str, dict[str, float]]:
    return {name: dict.fromkeys(PHASES, 0.0) for name in ("seconds", "cpu_seconds", "peak_bytes")}


def peak_bytes(device: str) -> int:
    """The most bytes since `reset_peak`: allocated on the GPU, or resident of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: str) -> None:
    """Start a new peak. Where the system cannot, peaks are those since the process began."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
