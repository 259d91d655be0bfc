"""How positive a completion sounds."""

from __future__ import annotations

from functools import cache
from typing import Any

from .text import completion_text


def vader_sentiment(completions: list, **kwargs: Any) -> list[float]:
    """VADER's compound score of each completion, from -1 (negative) to 1 (positive); a text without opinion words is 0.

    Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", 2014.
    A lexicon with rules: fast, deterministic and made for English.
    Raises `ImportError`, with the install command, when the vaderSentiment package is missing.
    """
    analyzer = prepare()
    return [analyzer.polarity_scores(completion_text(completion))["compound"] for completion in completions]


@cache  # reading the lexicon takes a tenth of a second
def prepare() -> Any:
    """The analyzer. Raises `ImportError`, with the install command, when the vaderSentiment package is missing."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ImportError(
            "reward 'vader_sentiment' needs the vaderSentiment package: pip install 'trl-alpharl[sentiment]'"
        ) from error
    return SentimentIntensityAnalyzer()


__all__ = ["vader_sentiment"]
