"""The coefficient of the entropy bonus: fixed, or steered so that the policy's entropy follows a target.

An entropy constraint does not bound how far the policy drifts from the reference; keep a small KL penalty beside it.
"""

from __future__ import annotations

from typing import Any


def entropy_target(initial: float, start: float, end: float, progress: float) -> float:
    """H_target = H_0 (f_0 + (f_1 - f_0) k / K): a share of the first policy's entropy that moves over the run.

    Args: initial, H_0 in nats; start and end, the shares f_0 and f_1; progress, k / K in [0, 1].
    Returns: nats.

    >>> round(entropy_target(2.0, 0.8, 0.3, progress=0.5), 6)
    1.1
    """
    return initial * (start + (end - start) * progress)


class FixedEntropy:
    """The coefficient that the configuration names, all run long; the interface of the steered ones.

    Args: coef, in loss (or reward) a nat.

    >>> controller = FixedEntropy(0.01)
    >>> controller.update(entropy=1.0, progress=0.5)
    >>> controller.coef
    0.01
    """

    target: float | None = None

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, entropy: float, progress: float) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the coefficient comes from the configuration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class _Steered:
    """Target and limits of a coefficient that follows the error e = (H_target - H) / H_0 after each rollout."""

    def __init__(self, coef: float, limits: tuple[float, float], start: float, end: float) -> None:
        self.coef = coef
        self.low, self.high = limits
        self.start, self.end = start, end
        self.initial: float | None = None
        self.target: float | None = None

    def update(self, entropy: float, progress: float) -> None:
        """Move the coefficient by what the last rollout showed; the first rollout's entropy becomes H_0.

        Args: entropy, the mean entropy of the policy's next-token distribution in nats; progress, the share of the run
            that is over.
        """
        if self.initial is None:
            self.initial = entropy
        self.target = entropy_target(self.initial, self.start, self.end, progress)
        error = (self.target - entropy) / max(self.initial, 1e-8)
        self.coef = self._next(error)

    def _next(self, error: float) -> float:
        raise NotImplementedError

    def _clip(self, coef: float) -> float:
        return min(max(coef, self.low), self.high)

    def state_dict(self) -> dict[str, Any]:
        """Coefficient, first entropy and target."""
        return {"coef": self.coef, "initial": self.initial, "target": self.target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved numbers. Limits and shares come from the configuration."""
        self.coef, self.initial, self.target = state["coef"], state["initial"], state["target"]


class EntropyDual(_Steered):
    """Dual ascent on the constraint H >= H_target: coef <- clip(coef + rate x e, low, high).

    It works both ways: above the target the coefficient falls. With low < 0 it may become a penalty on entropy.

    Args: coef, where it starts; rate, eta; limits, (low, high); start and end, shares of the first entropy.

    >>> dual = EntropyDual(0.01, rate=0.02, limits=(0.0, 0.05), start=0.8, end=0.3)
    >>> dual.update(entropy=2.0, progress=0.0)  # H_0 = 2, target 1.6: 20 % of H_0 too high
    >>> round(dual.coef, 6)
    0.006
    """

    def __init__(self, coef: float, rate: float, limits: tuple[float, float], start: float, end: float) -> None:
        super().__init__(coef, limits, start, end)
        self.rate = rate

    def _next(self, error: float) -> float:
        return self._clip(self.coef + self.rate * error)


class EntropyPI(_Steered):
    """A proportional-integral controller: coef = clip(first coef + kp x e + ki x sum of e, low, high).

    Anti-windup: an error that would push the coefficient further beyond a limit it has reached is not summed.

    Args: coef, its value at error 0 and sum 0; kp and ki, the gains; limits, (low, high); start and end as above.

    >>> pi = EntropyPI(0.01, kp=0.1, ki=0.01, limits=(0.0, 0.05), start=0.8, end=0.3)
    >>> pi.update(entropy=2.0, progress=0.0)
    >>> pi.coef, pi.integral  # 0.01 - 0.02 - 0.002 < 0, so the error is not summed
    (0.0, 0.0)
    >>> pi.update(entropy=1.0, progress=0.0)
    >>> round(pi.coef, 6), round(pi.integral, 6)
    (0.043, 0.3)
    """

    def __init__(
        self, coef: float, kp: float, ki: float, limits: tuple[float, float], start: float, end: float
    ) -> None:
        super().__init__(coef, limits, start, end)
        self.kp, self.ki = kp, ki
        self.first = coef
        self.integral = 0.0

    def _next(self, error: float) -> float:
        wanted = self.first + self.kp * error + self.ki * (self.integral + error)
        pushes_out = (wanted > self.high and error > 0) or (wanted < self.low and error < 0)
        if not pushes_out:
            self.integral += error
        return self._clip(wanted)

    def state_dict(self) -> dict[str, Any]:
        """As of the dual, and the sum of errors."""
        return {**super().state_dict(), "integral": self.integral}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved numbers. Gains, limits and shares come from the configuration."""
        super().load_state_dict(state)
        self.integral = state["integral"]
