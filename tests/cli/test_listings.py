from __future__ import annotations

import inspect
import sys

import pytest

from trl_alpharl.cli import metrics, recipes, rewards
from trl_alpharl.cli.listing import print_listing
from trl_alpharl.metrics_table import METRICS
from trl_alpharl.recipe import find_recipe, shipped_recipes
from trl_alpharl.rewards import REWARD_FUNCS, get_reward, sentiment


def entries(capsys) -> dict[str, str]:
    """What was printed, by the name that starts a line; wrapped lines joined again."""
    found: dict[str, str] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name, _, text = line.partition("  ")
            found[name] = text.strip()
    return found


def test_recipes_show_their_first_comment_line(capsys):
    recipes.run([])
    listed = entries(capsys)
    assert listed.keys() == shipped_recipes().keys()
    for name, text in listed.items():
        assert find_recipe(name).read_text(encoding="utf-8").startswith(f"# {text}\n")


def test_rewards_show_their_docstrings(capsys):
    pytest.importorskip("vaderSentiment")
    rewards.run([])
    listed = entries(capsys)
    assert listed.keys() == REWARD_FUNCS.keys()
    for name, text in listed.items():
        assert text and inspect.getdoc(get_reward(name)).startswith(text)


def test_a_reward_without_its_package_shows_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    sentiment.prepare.cache_clear()
    rewards.run([])
    listed = entries(capsys)
    assert "pip install 'trl-alpharl[sentiment]'" in listed["vader_sentiment"]
    assert listed.keys() == REWARD_FUNCS.keys()


def test_metrics_show_meaning_and_unit(capsys):
    metrics.run([])
    listed = entries(capsys)
    assert listed.keys() == METRICS.keys()
    assert listed["objective/kl"] == f"{METRICS['objective/kl'].meaning} [nats]"
    assert listed["val/ratio"] == METRICS["val/ratio"].meaning


def test_texts_wrap_in_their_own_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    print_listing({"a": "one two three four five six", "long": "x"})
    assert capsys.readouterr().out == "a     one two three four five\n      six\nlong  x\n"


def test_an_empty_listing_prints_nothing(capsys):
    print_listing({})
    assert capsys.readouterr().out == ""
