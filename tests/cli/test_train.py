from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import trl_alpharl
from trl_alpharl.cli.main import main


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """A stand-in for the training itself: remembers the recipe and measures what a run measures."""
    outcome = {
        "score_before": 0.25,
        "score_after": 2.5,
        "score_before_se": 0.1,
        "score_after_se": 0.2,
        "kl": 3.0,
        "entropy": 20.0,
        "seconds": 61.4,
        "response_tokens_per_s": 812.3,
        "rows": [{"prompt": "a [b]", "before": "x", "after": "y", "score_before": 0.0, "score_after": 1.0}],
        "output_dir": str(tmp_path / "run"),
        "log_history": [{"episode": 8, "objective/scores": 0.5, "objective/kl": 0.1, "objective/entropy": 20.0}],
    }
    stand_in = SimpleNamespace(recipes=[], outcome=outcome, build=lambda recipe: recipe)

    def run(recipe):
        stand_in.recipes.append(recipe)
        return outcome

    stand_in.run = run
    monkeypatch.setitem(sys.modules, "trl_alpharl.pipeline", stand_in)
    monkeypatch.setattr(trl_alpharl, "pipeline", stand_in, raising=False)
    return stand_in


def test_a_run_leaves_curve_and_summary_and_shows_the_completions(pipeline, tmp_path, capsys):
    assert main(["train", "quickstart/ppo_tiny", "--seed", "3"]) == 0
    (recipe,) = pipeline.recipes
    assert (recipe.name, recipe.values["seed"]) == ("quickstart/ppo_tiny", 3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["curve.png", "summary.json"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["score_before"], summary["score_after"]) == (0.25, 2.5)
    shown = capsys.readouterr().out
    assert "a [b]" in shown and "0.250 ± 0.100" in shown and "summary.json" in shown


def test_other_processes_report_nothing(pipeline, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "quickstart/ppo_tiny"]) == 0
    assert len(pipeline.recipes) == 1
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "accelerator", "told"), [("2", False, "true"), ("2", True, "false"), ("1", False, "false")]
)
def test_processes_without_an_accelerator_are_told_to_meet(pipeline, monkeypatch, processes, accelerator, told):
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    seen = []
    monkeypatch.setattr(pipeline, "run", lambda recipe: seen.append(told_now()) or pipeline.outcome)

    def told_now():
        import os

        return os.environ["ACCELERATE_USE_CPU"]

    assert main(["train", "quickstart/ppo_tiny"]) == 0
    assert seen == [told]


@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_help_does_not_train(pipeline, flag, capsys):
    assert main(["train", "quickstart/ppo_tiny", flag]) == 0
    assert pipeline.recipes == []
    assert ("--output_dir" in capsys.readouterr().out) == (flag == "--help-all")


def test_other_errors_keep_their_traceback(pipeline, monkeypatch):
    def fail(recipe):
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train", "quickstart/ppo_tiny"])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("kl_coef is -1.0; it must be 0 or more.\nsecond line"), "kl_coef is -1.0"),
        (RuntimeError("TensorBoardCallback requires tensorboard"), "requires tensorboard"),
        (ImportError("reward 'vader_sentiment' needs a package"), "needs a package"),
        (OSError(), "OSError"),
    ],
)
def test_what_only_the_libraries_can_judge_is_one_line_too(pipeline, monkeypatch, capsys, error, told):
    def fail(recipe):
        raise error

    monkeypatch.setattr(pipeline, "build", fail)
    assert main(["train", "quickstart/ppo_tiny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ppo_tiny.yaml" in line and told in line
