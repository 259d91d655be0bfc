"""`trl-alpharl recipes`: what comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..recipe import shipped_recipes
from .listing import no_arguments, print_listing

HELP = "list the shipped recipes"


def run(argv: Sequence[str]) -> int:
    """Print each recipe's name and the first line of the comment at its head."""
    no_arguments("recipes", argv)
    print_listing({name: _first_comment(path) for name, path in shipped_recipes().items()})
    return 0


def _first_comment(path: Path) -> str:
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    return first.removeprefix("#").strip()
