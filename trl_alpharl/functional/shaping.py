"""How much a shaping reward counts at each stage of the run: it helps a beginner and fades as the policy succeeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

SHAPING_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "success": lambda success, progress: 1 - success,
    "linear": lambda success, progress: 1 - progress,
    "cosine": lambda success, progress: (1 + math.cos(math.pi * progress)) / 2,
}


def shaping_weight(schedule: str, start: float, success: float, progress: float) -> float:
    """The factor w on a shaping reward in r = x + w Phi: w0 (1 - success), or falling from w0 to 0 over the run.

    Args: schedule, a key of SHAPING_SCHEDULES; start, w0; success, the average success rate so far, in [0, 1];
        progress, the share of the run that is over, in [0, 1].
    Raises: ValueError for an unknown schedule.

    >>> [shaping_weight(name, 2.0, success=0.25, progress=0.5) for name in ("success", "linear", "cosine")]
    [1.5, 1.0, 1.0]
    """
    if schedule not in SHAPING_SCHEDULES:
        raise ValueError(f"shaping_schedule: found {schedule!r}, must be one of {', '.join(SHAPING_SCHEDULES)}")
    return start * SHAPING_SCHEDULES[schedule](success, progress)


class SuccessRate:
    """Exponential average of the share of completions that succeed, 0 before the first.

    >>> rate = SuccessRate(decay=0.9)
    >>> rate.update(0.5)
    >>> rate.rate
    0.04999999999999999
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.rate = 0.0

    def update(self, rate: float) -> None:
        """Add a rollout's success rate."""
        self.rate = self.decay * self.rate + (1 - self.decay) * rate

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved average."""
        self.rate = state["rate"]
