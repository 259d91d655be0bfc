from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from trl_alpharl.reporting.curve import draw_curve

KEYS = ("objective/scores", "objective/kl", "objective/entropy")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws a history and returns the figure behind the picture."""
    figures = []
    savefig = Figure.savefig

    def remember(self, *args, **kwargs):
        figures.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)

    def draw(history):
        draw_curve(history, tmp_path / "new/curve.png")
        return figures[-1]

    return draw


def history(length: int) -> list[dict]:
    rng = np.random.default_rng(0)
    return [{"episode": 8 * (i + 1), **{key: float(rng.normal()) for key in KEYS}} for i in range(length)]


def test_it_is_a_picture_with_a_panel_for_each_key(drawn, tmp_path):
    figure = drawn(history(5))
    assert imread(tmp_path / "new/curve.png").shape == (990, 1125, 4)
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["score", "KL to the reference", "entropy"]
    assert [axis.get_ylabel() for axis in figure.axes] == ["reward per completion"] + ["nats per completion"] * 2
    assert figure.axes[-1].get_xlabel() == "episodes (completions sampled)"


def test_it_shows_the_log(drawn):
    logs = history(5)
    logs.insert(2, {"eval_objective/scores": 1.0, "episode": 20})
    logs.append({"train_runtime": 3.0})
    for key, axis in zip(KEYS, drawn(logs).axes, strict=True):
        (line,) = axis.lines
        np.testing.assert_array_equal(line.get_xdata(), [8, 16, 24, 32, 40])
        np.testing.assert_array_equal(line.get_ydata(), [log[key] for log in logs if key in log])


def test_a_long_log_gets_its_running_mean(drawn):
    logs = history(40)
    values = np.array([log[KEYS[0]] for log in logs])
    raw, mean = drawn(logs).axes[0].lines
    np.testing.assert_array_equal(raw.get_ydata(), values)
    np.testing.assert_allclose(mean.get_ydata()[3:], np.convolve(values, np.ones(4) / 4, "valid"))
    np.testing.assert_allclose(mean.get_ydata()[:2], [values[0], values[:2].mean()])


def test_values_that_are_not_finite_do_not_hide_the_others(drawn):
    logs = history(40)
    logs[10][KEYS[0]] = math.nan
    logs[11][KEYS[0]] = math.inf
    _, mean = drawn(logs).axes[0].lines
    assert np.isfinite(mean.get_ydata()).all()
    assert mean.get_ydata()[11] == pytest.approx(np.mean([logs[8][KEYS[0]], logs[9][KEYS[0]]]))


def test_a_run_without_logs_says_so(drawn):
    for axis in drawn([{"train_runtime": 1.0}]).axes:
        assert not axis.lines
        assert [text.get_text() for text in axis.texts] == ["nothing was logged"]
