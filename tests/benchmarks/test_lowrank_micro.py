"""lowrank_micro.py on the tiny model: every part runs and says what it measured."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def micro(benchmark, monkeypatch):
    module = benchmark("lowrank_micro")
    monkeypatch.setattr(module, "RANK", 8)
    monkeypatch.setattr(module, "RANKS", (4, 8))
    return module


@pytest.fixture
def corpus(micro, tokenizer):
    found = micro.Corpus(tokenizer)
    words = torch.randint(2, 64, (64, 12), generator=torch.Generator().manual_seed(0)).tolist()
    found.texts = [" ".join(f"w{i}" for i in row) for row in words]
    return found


def test_methods_are_ranked_as_they_should_be(micro, model, corpus):
    rows = {(row["method"], row["rank"]): row for row in micro.methods(model, corpus, short=True)}
    assert rows["svd", 8]["excess_error_worst"] == pytest.approx(0, abs=1e-3)
    assert rows["rsvd", 8]["excess_error_worst"] < 0.02 < rows["random", 8]["excess_error_mean"]


def test_every_arm_of_the_optimizer_is_compared_with_adamw(micro, model, corpus):
    rows = micro.optimizer(model, corpus, short=True)
    assert rows[0]["arm"] == "adamw" and rows[0]["step_over_adamw"] == 1
    assert len(rows) == 5 and all(row["step_s"] > 0 for row in rows)


def test_the_norm_s_error_is_small_once_a_basis_is_found(micro, model, corpus):
    first, later = micro.norm(model, corpus, short=True)
    assert first["when"] == "first step" and later["p95"] < 0.3


def test_rows_become_a_table(micro):
    assert micro.table([{"a": 1, "b": 0.5}]) == "| a | b |\n|---|---|\n| 1 | 0.5 |"
