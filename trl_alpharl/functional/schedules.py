"""The coefficient of the KL penalty over the run: fixed, or steered toward a target."""

from __future__ import annotations

import math
from typing import Any

_LARGEST_ERROR = 0.2


class FixedKLController:
    """The coefficient that the configuration names, all run long.

    Args: kl_coef >= 0, in reward a nat.
    Raises: ValueError for another value.

    >>> controller = FixedKLController(0.05)
    >>> controller.update(kl=12.0, episodes=64)
    >>> controller.kl_coef
    0.05
    """

    def __init__(self, kl_coef: float) -> None:
        self.kl_coef = _checked("kl_coef", kl_coef)

    def update(self, kl: float, episodes: int) -> None:
        """Nothing: it has the adaptive controller's interface."""

    def state_dict(self) -> dict[str, Any]:
        """The same form as the adaptive controller's, so that a resumed run may change from one to the other."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the form only: a fixed coefficient comes from the configuration of the resumed run."""
        _coefficient_of(state)


class AdaptiveKLController:
    """A proportional controller of the KL penalty (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    After each rollout coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon: the paper's gain, 0.1, written
    as episodes / horizon (as its code does), so that the rollout's size does not change the pace.

    Args: kl_coef > 0, where it starts, in reward a nat; target > 0, the KL of a completion to hold, in nats;
        horizon > 0, in episodes: the smaller, the faster.
    Raises: ValueError for another value.

    >>> controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    >>> controller.update(kl=12.0, episodes=50)
    >>> round(controller.kl_coef, 6)
    0.11
    """

    def __init__(self, kl_coef: float, target: float, horizon: int) -> None:
        self.kl_coef = _checked("kl_coef", kl_coef, positive=True)
        self.target = _checked("kl_target", target, positive=True)
        self.horizon = _checked("kl_horizon", horizon, positive=True)

    def update(self, kl: float, episodes: int) -> None:
        """Move the coefficient by what the last rollout showed.

        Args: kl, the mean KL of its completions in nats (an estimate may be negative); episodes, its completions over
            all processes.
        Raises: ValueError for a kl that is not finite, a negative count, or more episodes than the horizon bears (from
            five horizons on, one update could bring the coefficient to 0 or below).
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl: found {kl}, must be finite")
        if not 0 <= episodes * _LARGEST_ERROR < self.horizon:
            raise ValueError(
                f"kl_horizon: found {self.horizon:g} for {episodes} episodes a rollout, "
                f"must be above {_LARGEST_ERROR} times the episodes, and these >= 0"
            )
        error = min(max(kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.kl_coef *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The coefficient. Target and horizon come from the configuration."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved coefficient.

        Raises: ValueError for a state of another form, or whose coefficient is not above 0.
        """
        self.kl_coef = _checked("kl_coef", _coefficient_of(state), positive=True)


def _coefficient_of(state: dict[str, Any]) -> float:
    if set(state) != {"kl_coef"}:
        raise ValueError(f"state of the KL controller: found the keys {sorted(state)}, must be ['kl_coef']")
    return _checked("kl_coef", state["kl_coef"])


def _checked(name: str, value: float, positive: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (positive and value == 0):
        raise ValueError(f"{name}: found {value!r}, must be a finite number {'> 0' if positive else '>= 0'}")
    return float(value)
