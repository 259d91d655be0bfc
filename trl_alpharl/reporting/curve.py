"""The curve of a run as a picture: did the score rise, and at what price."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..metrics_table import METRICS
from .atomic import write_atomically


class _Panel(NamedTuple):
    key: str
    title: str
    color: str


_PANELS = (
    _Panel("objective/scores", "score", "#1b6ca8"),
    _Panel("objective/kl", "KL to the reference", "#b5541c"),
    _Panel("objective/entropy", "entropy", "#3c7a3f"),
)
_SMOOTH_FROM = 20  # points; with fewer the raw line is readable


def draw_curve(log_history: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw score, KL and entropy over the episodes into a PNG, atomically.

    `log_history` is the trainer's: entries without `episode` and the key of a panel are passed over. A panel without
    entries says so. Faint is the log itself, bold its running mean over a tenth of the run.
    """
    from matplotlib.figure import Figure  # half a second, and without pyplot no display is looked for

    figure = Figure(figsize=(7.5, 6.6), dpi=150, layout="constrained")
    axes = figure.subplots(len(_PANELS), 1, sharex=True)
    for axis, panel in zip(axes, _PANELS, strict=True):
        points = [
            (entry["episode"], entry[panel.key]) for entry in log_history if {"episode", panel.key} <= entry.keys()
        ]
        _draw_panel(axis, panel, points)
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("episodes (completions sampled)")
    figure.align_ylabels(axes)
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def _draw_panel(axis: Any, panel: _Panel, points: list[tuple[float, float]]) -> None:
    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=panel.color)
    axis.set_ylabel(f"{METRICS[panel.key].unit} per completion", fontsize=9)
    axis.tick_params(labelsize=9)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    if not points:
        axis.text(0.5, 0.5, "nothing was logged", transform=axis.transAxes, ha="center", va="center", color="#888888")
        return
    episodes, values = zip(*points, strict=True)
    if len(values) < _SMOOTH_FROM:
        axis.plot(episodes, values, color=panel.color, linewidth=1.8, marker="o", markersize=3.5)
        return
    axis.plot(episodes, values, color=panel.color, linewidth=0.9, alpha=0.35)
    axis.plot(episodes, _running_mean(values, len(values) // 10), color=panel.color, linewidth=2.2)
    axis.set_title("faint: each log, bold: running mean", loc="right", fontsize=8, color="#888888")


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to `width - 1` before it; values that are not finite are left out."""
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means
