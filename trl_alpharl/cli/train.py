"""`trl-alpharl train RECIPE [--key value ...]`, also `accelerate launch -m trl_alpharl.cli.train RECIPE`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..recipe import RecipeError, load_recipe
from .field_help import train_help

HELP = "train as a recipe says"


def run(argv: Sequence[str]) -> int:
    """Check the recipe and the flags, train, and leave `curve.png` and `summary.json` in the output folder.

    Raises RecipeError for a mistake in the recipe or the flags, before anything heavy is imported.
    """
    for flag in ("-h", "--help", "--help-all"):
        if flag in argv:
            print(train_help(everything=flag == "--help-all"))
            return 0
    if not argv or argv[0].startswith("-"):
        raise RecipeError("train: found no recipe after 'train'; 'trl-alpharl recipes' lists the shipped ones")
    recipe = load_recipe(argv[0], argv[1:])
    _let_cpu_processes_meet()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about optional kernels at every import
    from .. import pipeline

    try:
        prepared = pipeline.build(recipe)
    # A field or a file that only the libraries could judge, or a package that the recipe needs and that is missing.
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        told = str(error).strip() or type(error).__name__
        raise RecipeError(f"{recipe.path}: {told.splitlines()[0]}") from error
    outcome = pipeline.run(prepared)
    if int(os.environ.get("RANK", "0")) == 0:
        _report(outcome)
    return 0


def _let_cpu_processes_meet() -> None:
    """Several processes on a machine without an accelerator train together only when accelerate is told that it is a
    CPU run; otherwise each would silently train alone, over the other's files."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _report(outcome: dict[str, Any]) -> None:
    from rich.console import Console

    from ..reporting.curve import draw_curve
    from ..reporting.summary import summarize, write_summary
    from ..reporting.table import print_outcome

    console = Console()
    folder = Path(outcome["output_dir"])
    summary = summarize(outcome)
    write_summary(folder / "summary.json", summary)
    draw_curve(outcome["log_history"], folder / "curve.png")
    print_outcome(summary, console)
    console.print(f"{folder / 'summary.json'}, {folder / 'curve.png'}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    from .main import main

    sys.exit(main(["train", *sys.argv[1:]]))
