"""When the policy stops learning from a rollout that it has moved away from."""

from __future__ import annotations

from typing import Any


def kl_stops(kl: float, limit: float, epoch: int) -> bool:
    """Whether the policy has moved too far from the rollout's: mean(q - 1 - log q) > limit, from the second epoch on.

    Args: kl, that mean over a mini-batch's tokens, q = pi / pi_old, in nats; limit > 0 (0: never); epoch, from 0.

    >>> kl_stops(0.01, limit=0.008, epoch=0), kl_stops(0.01, limit=0.008, epoch=1)
    (False, True)
    """
    return limit > 0 and epoch >= 1 and kl > limit


def gradient_surges(norm: float, usual: float, factor: float, epoch: int) -> bool:
    """Whether the gradient at the head's input has surged while a rollout is reused (DGG, arXiv 2605.19425).

    Args: norm, of this mini-batch; usual, the mean over the first epoch's; factor > 1 (0: never); epoch, from 0.

    >>> gradient_surges(3.0, usual=1.0, factor=2.0, epoch=0), gradient_surges(3.0, usual=1.0, factor=2.0, epoch=1)
    (False, True)
    """
    return factor > 0 and epoch >= 1 and norm > factor * usual


class UpdateGate:
    """Both rules over the mini-batches of a rollout. Once a rule fires, the rollout trains the critic alone.

    A KL stop lets the step that showed it pass; a surge drops it.

    Args: kl_limit and surge_factor, 0: without that rule.

    >>> gate = UpdateGate(kl_limit=0.008)
    >>> gate.admit(epoch=0, kl=0.5), gate.open, gate.admit(epoch=1, kl=0.5), gate.open
    (True, True, True, False)
    >>> gate.new_rollout()
    >>> gate.open
    True
    """

    def __init__(self, kl_limit: float = 0.0, surge_factor: float = 0.0) -> None:
        self.kl_limit, self.surge_factor = kl_limit, surge_factor
        self.new_rollout()

    def new_rollout(self) -> None:
        """The next mini-batch is the first of a fresh rollout."""
        self.open = True
        self._norm_sum, self._norms = 0.0, 0

    def admit(self, epoch: int, kl: float = 0.0, head_gradient: float = 0.0) -> bool:
        """Look at a mini-batch of the policy; True when its step may be taken."""
        if self._norms and gradient_surges(head_gradient, self._norm_sum / self._norms, self.surge_factor, epoch):
            self.open = False
            return False
        if epoch == 0:
            self._norm_sum += head_gradient
            self._norms += 1
        self.open = self.open and not kl_stops(kl, self.kl_limit, epoch)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Where in the rollout it stands."""
        return {"open": self.open, "norm_sum": self._norm_sum, "norms": self._norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self.open, self._norm_sum, self._norms = state["open"], state["norm_sum"], state["norms"]
