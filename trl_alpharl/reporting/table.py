"""Tables of completions for the terminal. Texts come from datasets and models: they are shown, never interpreted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..units import display_bytes
from .summary import Summary

LONGEST = 320  # characters of a text that are shown

Scores = Sequence[float | None]


def completions_table(
    prompts: Sequence[str], before: Sequence[str], after: Sequence[str], scores_before: Scores, scores_after: Scores
) -> Table:
    """One row a prompt: its completion and score before and after training; a score that rose is green, one that fell
    red. A score of None is shown as a dash. Raises ValueError when the columns differ in length."""
    table = _table("Completions before and after training", ["Prompt", "Before", "Score", "After", "Score"])
    for prompt, old, new, was, now in zip(prompts, before, after, scores_before, scores_after, strict=True):
        style = ""
        if was is not None and now is not None and was != now:
            style = "green" if now > was else "red"
        table.add_row(_text(prompt, "dim"), _text(old), _score(was), _text(new), _score(now, style))
    return table


def print_outcome(summary: Summary, console: Console) -> None:
    """Print the run's completions before and after, and its figures below in two lines."""
    columns = ("prompt", "before", "after", "score_before", "score_after")
    if summary["rows"]:
        console.print(completions_table(*([row[column] for row in summary["rows"]] for column in columns)))
    figures = Text("score ")
    figures.append(f"{summary['score_before']:.3f} ± {summary['score_before_se']:.3f}")
    figures.append(" -> ")
    figures.append(f"{summary['score_after']:.3f} ± {summary['score_after_se']:.3f}", "bold")
    figures.append("  (mean ± standard error)\n")
    figures.append(f"KL {summary['kl']:.2f} and entropy {summary['entropy']:.2f} nats a completion; ")
    figures.append(f"{summary['seconds']:.0f} s")
    if math.isfinite(summary["response_tokens_per_s"]):  # a run that ended inside its first rollout logged none
        figures.append(f" at {summary['response_tokens_per_s']:.0f} completion tokens/s")
    figures.append(", ")
    figures.append(f"peak memory {display_bytes(summary['peak_rss_bytes'])}")
    console.print(figures)


def _table(title: str, headings: list[str]) -> Table:
    table = Table(title=Text(title), title_style="bold", box=box.ROUNDED, show_lines=True, expand=True)
    for heading in headings:
        if heading == "Score":
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold", ratio=1)
    return table


def _text(text: str, style: str = "") -> Text:
    # Text, not str: rich reads [brackets] in a str as its own markup. A control character could drive the terminal.
    shown = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return Text("".join(c if c.isprintable() or c == "\n" else " " for c in shown).strip(), style)


def _score(score: float | None, style: str = "") -> Text:
    return Text("-" if score is None else f"{score:.2f}", style)
