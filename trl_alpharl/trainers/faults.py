"""Steps that were skipped because something was not finite."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

MOST_IN_A_ROW = 3


class FaultCounter:
    """Counts skipped optimizer steps and stops the run at the third fault in a row.

    A rollout with a bad reward is one fault, however many steps it would have given.
    """

    def __init__(self) -> None:
        self.skipped_steps = 0
        self.in_a_row = 0

    def record(self, cause: str, steps: int) -> None:
        """A fault that costs `steps` optimizer steps. The third in a row raises FloatingPointError with the cause."""
        self.in_a_row += 1
        logger.warning(
            f"skipping {steps} optimizer step(s): {cause} is not finite. Weights and optimizer are unchanged."
        )
        if self.in_a_row >= MOST_IN_A_ROW:
            raise FloatingPointError(f"stopped after {self.in_a_row} faults in a row: {cause} is not finite.")

    def skipped_step(self) -> None:
        """An optimizer step that trained nothing because of a fault."""
        self.skipped_steps += 1

    def good_step(self) -> None:
        """A step went through."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"skipped_steps": self.skipped_steps, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved counts."""
        self.skipped_steps, self.in_a_row = state["skipped_steps"], state["in_a_row"]
