"""`trl-alpharl metrics`: what a run logs."""

from __future__ import annotations

from collections.abc import Sequence

from ..metrics_table import METRICS
from .listing import no_arguments, print_listing

HELP = "list the logged keys with meaning and unit"


def run(argv: Sequence[str]) -> int:
    """Print each key with its meaning and unit."""
    no_arguments("metrics", argv)
    print_listing({key: f"{meaning} [{unit}]" if unit else meaning for key, (meaning, unit) in METRICS.items()})
    return 0
