"""The command `trl-alpharl`: one subcommand a file, loaded without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from .. import __version__
from ..recipe import RecipeError
from . import metrics, recipes, rewards, train

COMMANDS = {"train": train, "recipes": recipes, "rewards": rewards, "metrics": metrics}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0, or 2 after a mistake of the user's, told in one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print(f"trl-alpharl {__version__}")
        return 0
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        return _fail(f"{command}: unknown command; {hint}")
    if rest in (["-h"], ["--help"]) and command != "train":
        print(f"usage: trl-alpharl {command}\n\n{COMMANDS[command].HELP}")
        return 0
    try:
        return COMMANDS[command].run(rest)
    except RecipeError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"trl-alpharl: {message}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = [f"  {name:<10}{module.HELP}" for name, module in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trl-alpharl COMMAND [arguments]",
            "",
            "Reinforcement learning of language models with PPO.",
            "",
            *lines,
            "",
            "  --version  print the version",
            "  --help     print this text; 'trl-alpharl train --help' lists every field of a recipe",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
