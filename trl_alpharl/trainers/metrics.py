"""Sums between two logs, kept on the device, reduced over processes when they are logged."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MetricSums:
    """Running (sum, count) pairs in fp64; `flush` gives their means over all processes and starts anew."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add `total`, a sum over `count` things."""
        total = torch.as_tensor(total, dtype=torch.float64).detach()
        pair = torch.stack([total, torch.as_tensor(count, dtype=torch.float64, device=total.device)])
        self._sums[name] = self._sums[name].to(pair.device) + pair if name in self._sums else pair

    def add_all(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values under a mask; `flush` gives their mean and standard deviation, `name/mean` and `name/std`."""
        kept = values[mask].double()
        self.add(f"{name}/mean", kept.sum(), kept.numel())
        self.add(f"{name}/mean_of_squares", kept.square().sum(), kept.numel())

    def flush(
        self,
        reduce: Callable[[Tensor], Tensor] = lambda stacked: stacked,
        union: Callable[[list[str]], list[str]] = lambda names: names,
    ) -> dict[str, float]:
        """Means by name. `reduce` sums a tensor over processes, `union` joins their names. Names whose count is 0
        everywhere are left out."""
        names = sorted(union(list(self._sums)))
        if not names:
            return {}
        empty = torch.zeros(2, dtype=torch.float64)
        stacked = reduce(torch.stack([self._sums.get(name, empty).cpu() for name in names])).cpu()
        self._sums = {}
        means = {name: float(total / count) for name, (total, count) in zip(names, stacked) if count > 0}
        for name in [name for name in means if name.endswith("/mean_of_squares")]:
            stem = name.removesuffix("/mean_of_squares")
            means[f"{stem}/std"] = math.sqrt(max(0.0, means.pop(name) - means[f"{stem}/mean"] ** 2))
        return means

    def state_dict(self) -> dict[str, Any]:
        """The pairs as plain numbers."""
        return {name: pair.tolist() for name, pair in self._sums.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved pairs."""
        self._sums = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in state.items()}


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes: of the device on CUDA, else of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
