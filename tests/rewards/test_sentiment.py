import sys

import pytest

from trl_alpharl.rewards import get_reward, sentiment


def test_sign_and_range_follow_the_text():
    pytest.importorskip("vaderSentiment")
    good, bad, plain, empty = sentiment.vader_sentiment(
        completions=["What a wonderful, lovely day!", "This is terrible and sad.", "The table has four legs.", ""],
        prompts=["x"] * 4,
    )
    assert -1 <= bad < -0.3 < plain == empty == 0 < 0.3 < good <= 1


def test_chat_completions_score_as_their_text():
    pytest.importorskip("vaderSentiment")
    text = "I love it"
    chat = [{"role": "assistant", "content": text}]
    assert sentiment.vader_sentiment([chat]) == sentiment.vader_sentiment([text])


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    sentiment.prepare.cache_clear()
    for use in (lambda: sentiment.vader_sentiment(["fine"]), lambda: get_reward("vader_sentiment")):
        with pytest.raises(ImportError, match=r"pip install 'trl-alpharl\[sentiment\]'"):
            use()
