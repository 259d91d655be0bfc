"""`trl-alpharl rewards`: the rewards that `reward_funcs` knows by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from .listing import no_arguments, print_listing

HELP = "list the rewards that reward_funcs knows by name"


def run(argv: Sequence[str]) -> int:
    """Print each reward's name and the first line of its docstring."""
    no_arguments("rewards", argv)
    from ..rewards import REWARD_FUNCS

    print_listing({name: _first_line(name) for name in sorted(REWARD_FUNCS)})
    return 0


def _first_line(name: str) -> str:
    from ..rewards import get_reward

    try:
        return (inspect.getdoc(get_reward(name)) or "").partition("\n")[0]
    except ImportError as error:  # it says what to install
        return str(error)
