r"""Whether a completion's final answer is the reference answer.

LaTeX is compared as text: for symbolic equality (`\frac{1}{2}` = 0.5) use TRL's own `accuracy_reward`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from .text import completion_text

NUMBER = re.compile(
    r"""(?:(?<![\w)])[-+])?                              # no sign between operands: the last number of 10-5 is 5
        \$?
        (?:(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?  # 1,000.5 as one number; 1,2 as two
        |\.\d+)
        (?:/\d+)?""",
    re.ASCII | re.VERBOSE,
)


def exact_match(
    completions: list, answer: list | None = None, solution: list | None = None, **kwargs: Any
) -> list[float | None]:
    r"""1.0 where the completion's final answer is the row's reference (column `answer` or `solution`), else 0.0.

    The final answer is what the last `\boxed{...}`, `<answer>...</answer>` or `#### number` holds; without one of them
    the last number if the reference is a number, else the whole text. The reference is read in the same way, so a
    worked solution will do. Numbers are compared by value ("1,000" = "1000.0", "1/2" = "0.5"; "$" and "%" do not
    count), other answers by their letters, whatever the case and spacing. A reference of None gives None.
    Raises `ValueError` when the dataset has neither column.
    """
    references = solution if answer is None else answer
    if references is None:
        raise ValueError("reward 'exact_match' needs a column 'answer' or 'solution'; the dataset has neither.")
    return [
        None if reference is None else float(_matches(completion_text(completion), str(reference)))
        for completion, reference in zip(completions, references, strict=True)
    ]


def _matches(text: str, reference: str) -> bool:
    expected = _marked_answer(reference) or reference
    found = _marked_answer(text)
    number = _number(expected)
    if number is None:
        return _plain(text if found is None else found) == _plain(expected)
    if found is None:
        found = next(reversed(NUMBER.findall(_ascii_minus(text))), "")
    return _number(found) == number


def _marked_answer(text: str) -> str | None:
    """What the last answer marker of the text holds; None without a marker."""
    marked: dict[int, str] = {}
    for match in re.finditer(r"####([^\n]*)", text):
        if _number(match[1]) is not None:  # a Markdown heading starts like this too
            marked[match.start()] = match[1]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        marked[start] = text[start + len("<answer>") : end]
    start = text.rfind(r"\boxed{")
    inside = _braced(text[start + len(r"\boxed") :]) if start >= 0 else None
    if inside is not None:
        marked[start] = inside
    return marked[max(marked)] if marked else None


def _braced(text: str) -> str | None:
    """The inside of the brace that opens the text, inner braces included; None if it never closes."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:at]
    return None


def _number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, else None."""
    text = _ascii_minus(text).replace("\\", "").strip().rstrip(" .%")
    if not NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", "").replace("$", ""))
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, 1.5/2, 1/0
        return None


def _ascii_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


__all__ = ["exact_match"]
