"""From raw rows to the figures: episodes to a threshold, final score, fluctuation and KL, with 90 % intervals."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from .arms import BEST, ORACLE

COLUMNS = ("task", "arm", "seed", "episodes", "score", "kl", "entropy")
LAST = 4  # evaluations that make the final score
SMOOTH = 3  # evaluations that must be over the threshold together
RESAMPLES = 2000

Curves = dict[int, np.ndarray]  # seed -> (evaluations, 3): episodes, score, KL


def read_rows(path: Path) -> dict[tuple[str, str], Curves]:
    """The curves of each task and arm."""
    rows: dict[tuple[str, str], dict[int, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                numbers = [float(row[name]) for name in ("episodes", "score", "kl")]
                rows[row["task"], row["arm"]][int(row["seed"])].append(numbers)
    return {key: {seed: np.array(sorted(points)) for seed, points in runs.items()} for key, runs in rows.items()}


def append_rows(path: Path, task: str, arm: str, rows: list[dict[str, Any]]) -> None:
    """Add a finished cell, in one write: a run that is killed leaves whole cells."""
    fresh = not path.is_file()
    lines = [",".join(COLUMNS)] if fresh else []
    for row in rows:
        values = (row["seed"], row["episodes"], f"{row['score']:.6g}", f"{row['kl']:.6g}", f"{row['entropy']:.6g}")
        lines.append(",".join(map(str, (task, f'"{arm}"', *values))))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        file.write("\n".join(lines) + "\n")


def final_score(curve: np.ndarray) -> float:
    """Mean score of the last evaluations."""
    return float(curve[-LAST:, 1].mean())


def final_kl(curve: np.ndarray) -> float:
    """Mean KL of the last evaluations."""
    return float(curve[-LAST:, 2].mean())


def fluctuation(curve: np.ndarray) -> float:
    """Standard deviation of the score around its moving average of 5, the first quarter of the run left out."""
    scores = curve[len(curve) // 4 :, 1]
    trend = np.convolve(np.pad(scores, 2, mode="edge"), np.ones(5) / 5, mode="valid")
    return float((scores - trend).std())


def episodes_to(threshold: float, curve: np.ndarray) -> float:
    """Episodes until three evaluations in a row average the threshold; the whole budget when they never do."""
    means = np.convolve(curve[:, 1], np.ones(SMOOTH) / SMOOTH, mode="valid")
    reached = np.flatnonzero(means >= threshold)
    return float(curve[reached[0] + SMOOTH - 1, 0] if len(reached) else curve[-1, 0])


def interval(values: list[float], other: list[float] | None = None) -> tuple[float, float, float]:
    """The mean and its 90 % bootstrap interval over seeds; with `other`, of the relative difference of the means."""
    generator = np.random.default_rng(0)
    own = np.array(values)
    means = own[generator.integers(len(own), size=(RESAMPLES, len(own)))].mean(1)
    center = own.mean()
    if other is not None:
        base = np.array(other)
        bases = base[generator.integers(len(base), size=(RESAMPLES, len(base)))].mean(1)
        means, center = means / bases - 1, center / base.mean() - 1
    low, high = np.quantile(means, [0.05, 0.95])
    return float(center), float(low), float(high)


def at_kl(frontier: list[tuple[float, float]], kl: float) -> float:
    """The best score of plain PPO at a KL, on straight lines between its points (KL, score); flat beyond the ends."""
    best: list[tuple[float, float]] = []
    for point in sorted(frontier):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return float(np.interp(kl, [point[0] for point in best], [point[1] for point in best]))


def beyond(frontier: list[tuple[float, float]], kls: list[float], finals: list[float]) -> tuple[float, float, float]:
    """How far an arm's mean final score lies above plain PPO at the arm's mean KL, and the 90 % bootstrap interval over
    the arm's seeds; the points of plain PPO are taken as they are."""
    runs = np.array([kls, finals])
    means = runs[:, np.random.default_rng(0).integers(len(kls), size=(RESAMPLES, len(kls)))].mean(2)
    gaps = [final - at_kl(frontier, kl) for kl, final in means.T]
    low, high = np.quantile(gaps, [0.05, 0.95])
    return float(np.mean(finals)) - at_kl(frontier, float(np.mean(kls))), float(low), float(high)


def task_table(task: str, data: dict[tuple[str, str], Curves], against: str = BEST) -> str:
    """One task's arms as Markdown: each against the best PPO, or another arm that counts as plain PPO."""
    arms = {arm: curves for (name, arm), curves in data.items() if name == task}
    base = arms[against]
    start = float(np.mean([curve[0, 1] for curve in base.values()]))
    threshold = start + 0.8 * (float(np.mean([final_score(curve) for curve in base.values()])) - start)
    plain = [arm for arm in arms if arm.startswith("PPO ") or arm in (BEST, against)]
    frontier = [(_mean(final_kl, arms[arm]), _mean(final_score, arms[arm])) for arm in plain]
    lines = [
        f"### {task}: threshold {threshold:.3f}, from {start:.3f}",
        "",
        f"| arm | episodes to threshold | fewer than {against} | final | change | fluctuation | change | KL | "
        "final - PPO at that KL |",
        "|" + "---|" * 9,
    ]
    measures = (lambda curve: episodes_to(threshold, curve), final_score, fluctuation)
    reference = [[measure(curve) for curve in base.values()] for measure in measures]
    for arm, curves in arms.items():
        if arm.startswith("PPO "):
            continue
        own = [[measure(curve) for curve in curves.values()] for measure in measures]
        kls = [final_kl(curve) for curve in curves.values()]
        fewer, gain, calmer = (interval(values, other) for values, other in zip(own, reference))
        change = [_percent((-fewer[0], -fewer[2], -fewer[1])), _percent(gain), _percent(calmer)]
        if arm == against:
            change = ["", "", ""]
        cells = [
            arm,
            _plain(interval(own[0]), "{:.0f}"),
            change[0],
            _plain(interval(own[1]), "{:.3f}"),
            change[1],
            _plain(interval(own[2]), "{:.3f}"),
            change[2],
            _plain(interval(kls), "{:.1f}"),
            _plain(beyond(frontier, kls, own[1]), "{:+.3f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(measure: Any, curves: Curves) -> float:
    return float(np.mean([measure(curve) for curve in curves.values()]))


def _plain(values: tuple[float, float, float], form: str) -> str:
    center, low, high = (form.format(value) for value in values)
    return f"{center} [{low}, {high}]"


def _percent(values: tuple[float, float, float]) -> str:
    center, low, high = (f"{round(100 * value):+d}" for value in values)  # whole numbers have no minus zero
    return f"{center} % [{low}, {high}]"


def draw(data: dict[tuple[str, str], Curves], path: Path) -> None:
    """Mean curves of PPO and the presets, a panel a task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(task for task, arm in data if arm == BEST))
    high = -(-len(tasks) // 3)
    figure, panels = pyplot.subplots(high, min(3, len(tasks)), figsize=(12, 3 * high), squeeze=False)
    for panel in panels.flat[len(tasks) :]:
        panel.set_axis_off()
    for task, panel in zip(tasks, panels.flat):
        for arm in (BEST, "tuned", "paper", ORACLE):
            curves = list(data.get((task, arm), {}).values())
            if curves:
                scores = np.mean([curve[:, 1] for curve in curves], axis=0)
                panel.plot(curves[0][:, 0], scores, label=arm)
        panel.set_title(task)
        panel.set(xlabel="episodes", ylabel="score")
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
