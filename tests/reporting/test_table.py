from __future__ import annotations

import io

import pytest
from rich.console import Console

from trl_alpharl.reporting.table import LONGEST, completions_table, print_outcome


def shown(thing, width: int = 120, color: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=color, force_terminal=color is not None)
    console.print(thing)
    return console.file.getvalue()


def test_texts_are_not_markup():
    text = shown(completions_table(["[bold]a[/bold]"], ["[/red] [link=x]y[/link]"], ["[i]t[/i]"], [1.0], [1.0]))
    for literal in ("[bold]a[/bold]", "[/red] [link=x]y[/link]", "[i]t[/i]"):
        assert literal in text


def test_control_characters_do_not_reach_the_terminal():
    text = shown(completions_table(["a\x1b[2Jb"], ["c\rd\x07e\tf"], ["t"], [0.0], [0.0]))
    assert not {"\x1b", "\r", "\x07", "\t"} & set(text)
    assert "a [2Jb" in text and "c d e f" in text


def test_a_long_text_is_cut():
    text = shown(completions_table(["p"], ["x" * LONGEST + "y"], ["t"], [0.0], [0.0]))
    assert text.count("x") == LONGEST - 1
    assert "…" in text and "y" not in text


@pytest.mark.parametrize(
    ("was", "now", "color"), [(0.0, 1.0, "32"), (1.0, 0.5, "31"), (1.0, 1.0, None), (None, 1.0, None)]
)
def test_the_score_after_is_coloured_by_its_change(was, now, color):
    text = shown(completions_table(["p"], ["b"], ["a"], [was], [now]), color="standard")
    assert [code for code in ("32", "31") if f"\x1b[{code}m" in text] == ([color] if color else [])


def test_scores_and_rows_in_order():
    table = completions_table(["p1", "p2"], ["b1", "b2"], ["a1", "a2"], [0.123, None], [-2.0, 3.456])
    first, second = (line.split("│")[1:-1] for line in shown(table).splitlines() if "p1" in line or "p2" in line)
    assert [cell.strip() for cell in first] == ["p1", "b1", "0.12", "a1", "-2.00"]
    assert [cell.strip() for cell in second] == ["p2", "b2", "-", "a2", "3.46"]


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError):
        completions_table(["p"], ["b", "b"], ["a"], [0.0], [0.0])


def test_the_outcome_shows_table_and_figures():
    summary = {
        "score_before": 0.5,
        "score_after": 1.5,
        "score_before_se": 0.1,
        "score_after_se": 0.2,
        "kl": 2.0,
        "entropy": 30.0,
        "seconds": 59.6,
        "response_tokens_per_s": 700.4,
        "peak_rss_bytes": 3 << 29,
        "rows": [{"prompt": "the dog", "before": "ran", "after": "laughed", "score_before": 0.0, "score_after": 1.0}],
    }
    console = Console(file=io.StringIO(), width=100)
    print_outcome(summary, console)
    text = console.file.getvalue()
    assert "laughed" in text
    assert "score 0.500 ± 0.100 -> 1.500 ± 0.200" in text
    assert "KL 2.00 and entropy 30.00 nats a completion; 60 s at 700 completion tokens/s" in text
    assert "peak memory 1.50 GiB" in text
    console = Console(file=io.StringIO(), width=100)
    print_outcome({**summary, "rows": []}, console)
    assert "│" not in console.file.getvalue()
    console = Console(file=io.StringIO(), width=100)
    print_outcome({**summary, "response_tokens_per_s": float("nan")}, console)
    assert "60 s, peak memory" in console.file.getvalue()
