"""Each run in a process of its own, TRL 1.12's in an environment of its own. Standard library only: a process starts
with its parent's peak memory, so the parent stays small."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .work import Work

ROOT = Path(__file__).parents[2]
TRL_CONSTRAINTS = "constraints-oldest.txt"  # what all else but TRL has, too
_COMPLETE = "complete"


@dataclass(frozen=True)
class Sides:
    """How to start each side. `trl_python`: an interpreter whose environment has TRL 1.12; or `trl_path`: a folder that
    holds TRL 1.12, put before our own environment's packages. `core`: all processes run on this one, with one thread.
    """

    trl_python: str | None = None
    trl_path: str | None = None
    core: int | None = None

    def run(self, side: str, work: Work, timeout: float | None = None) -> dict[str, Any]:
        """The result of `ours`, `sft` (ours under a cross-entropy loss), `ending` or `trl`. `failed` in it says why
        there is none: out of memory, or out of time. Any other failure ends this process with the last line of it."""
        words = {
            "ours": ["speed.run_ours", "ppo"],
            "sft": ["speed.run_ours", "sft"],
            "ending": ["speed.run_ours", "ending"],
            "trl": ["speed.run_trl"],
        }[side]
        python = (self.trl_python or sys.executable) if side == "trl" else sys.executable
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            work.write(folder / "work.json")
            command = [python, "-m", *words, str(folder / "work.json"), str(folder / "result.json")]
            start = time.monotonic()
            try:
                done = subprocess.run(
                    command, env=self._environment(side), capture_output=True, text=True, timeout=timeout
                )
            except subprocess.TimeoutExpired:
                return {"side": side, "failed": "not done in time"}
            if done.returncode:
                if "OutOfMemoryError" in done.stderr:
                    return {"side": side, "failed": "out of memory"}
                raise SystemExit(f"{side} failed: {_last_line(done.stderr)}")
            result = json.loads((folder / "result.json").read_text())
        return {"side": side, **result, "process_s": time.monotonic() - start}

    def _environment(self, side: str) -> dict[str, str]:
        paths = [str(ROOT / "benchmarks"), str(ROOT)]
        if side == "trl" and self.trl_path is not None:
            paths.insert(0, self.trl_path)
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process itself, where its memory is seen
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        }
        if self.core is not None:
            own["OMP_NUM_THREADS"] = "1"
        return {**os.environ, **own}


def pin(core: int | None) -> int | None:
    """Keep this process, and those that it starts, on one core. Returns it; None where that cannot be."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        return None
    os.sched_setaffinity(0, {core})
    return core


def interleaved(first: str, second: str, pairs: int) -> list[str]:
    """A B B A A B ...: what drifts during the runs meets both sides alike."""
    return [side for i in range(pairs) for side in ((first, second) if i % 2 == 0 else (second, first))]


def make_trl_environment(folder: Path) -> str:
    """The interpreter of an environment with TRL 1.12, made in `folder` unless it is there."""
    python = folder / "bin" / "python"
    if (folder / _COMPLETE).exists():
        return str(python)
    steps: Sequence[Sequence[str]] = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / TRL_CONSTRAINTS), "-e", str(ROOT)],
    )
    for step in steps:
        if subprocess.run(step, stdout=sys.stderr).returncode:
            raise SystemExit(
                f"no environment with TRL 1.12 in {folder}: `{' '.join(step[1:4])}` failed, its message is above. "
                "Name one by --trl_python, or measure --sides ours."
            )
    (folder / _COMPLETE).touch()
    return str(python)


def fetch_trl(folder: Path, timeout: float) -> str | None:
    """A folder with TRL 1.12 and nothing else, for our own interpreter: quicker than an environment where packages are
    large. None where pip does not get it."""
    if not (folder / _COMPLETE).exists():
        pins = (ROOT / TRL_CONSTRAINTS).read_text().splitlines()
        (wanted,) = [line for line in pins if line.startswith("trl==")]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wanted]
        try:
            subprocess.run(command, check=True, timeout=timeout, stdout=sys.stderr)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        (folder / _COMPLETE).touch()
    return str(folder)


def describe_machine(core: int | None) -> dict[str, Any]:
    """Processor, cores and load, for the report."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "pinned_to_core": core,
        "load_before": os.getloadavg()[0],
    }


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a message"
