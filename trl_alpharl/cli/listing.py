"""Two aligned columns: the output of the subcommands that list things."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from ..recipe import RecipeError


def print_listing(entries: Mapping[str, str]) -> None:
    """Print a name and its text per entry, the texts wrapped to the terminal in a column of their own."""
    column = max(map(len, entries), default=0) + 2
    width = max(shutil.get_terminal_size((120, 40)).columns, column + 20)
    for name, text in entries.items():
        print(textwrap.fill(text, width, initial_indent=name.ljust(column), subsequent_indent=" " * column))


def no_arguments(command: str, argv: Sequence[str]) -> None:
    """Raise RecipeError when a subcommand without arguments was given some."""
    if argv:
        raise RecipeError(f"{command}: found '{' '.join(argv)}', expected nothing after it")
