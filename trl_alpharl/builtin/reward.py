"""The quickstart's reward: cheerful words, counted with the embedded corpus' own lexicon. Standard library only."""

from __future__ import annotations

import re
from typing import Any

from trl_alpharl.builtin.corpus import NEGATIVE, POSITIVE

_MOST = 3.0


def positive_words(prompts: list, completions: list, **kwargs: Any) -> list[float]:
    """Distinct positive words minus negative words of each completion, between -3 and 3; TRL's reward signature.

    A repeated positive word counts once, and two or three cheerful sentences reach the bound: neither repetition nor a
    list of adjectives pays. `completions` are texts or lists of chat turns, of which the last is read.

    >>> positive_words(prompts=["", ""], completions=["She felt happy, happy and proud.", "He was sad."])
    [2.0, -1.0]
    """
    return [
        _score(completion if isinstance(completion, str) else completion[-1]["content"]) for completion in completions
    ]


def _score(text: str) -> float:
    words = re.findall(r"\w+", text.lower())
    positive = len(POSITIVE.intersection(words))
    negative = sum(word in NEGATIVE for word in words)
    return max(-_MOST, min(_MOST, float(positive - negative)))
