"""What a side's process hands back."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch

from .clock import PhaseClock

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def versions() -> dict[str, str]:
    """Of the packages that matter for speed."""
    return {name: version(name) for name in PACKAGES}


def card(device: str) -> str | None:
    """The GPU's name."""
    return torch.cuda.get_device_name() if device == "cuda" else None


def write_result(path: Path, clock: PhaseClock) -> None:
    """Updates, versions and the card, as JSON."""
    result = {"updates": clock.updates, "versions": versions(), "card": card(clock.device)}
    path.write_text(json.dumps(result))
