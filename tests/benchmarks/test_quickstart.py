"""The table of the quickstart's seeds; the run itself is the pipeline's test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from trl_alpharl.recipe import shipped_recipes

PATH = Path(__file__).parents[2] / "benchmarks/quickstart.py"


@pytest.fixture
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_difference_is_in_standard_errors(quickstart):
    summary = {
        "seed": 4,
        "score_before": 1.0,
        "score_after": 2.0,
        "score_before_se": 0.3,
        "score_after_se": 0.4,
        "kl": 3.21,
        "entropy": 10.0,
        "seconds": 61.2,
    }
    cells = [cell.strip() for cell in quickstart.table([summary]).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["4", "1.00 ± 0.30", "2.00 ± 0.40", "2.0", "3.2", "10.0", "61"]


def test_the_recipe_exists(quickstart):
    assert quickstart.RECIPE in shipped_recipes()
