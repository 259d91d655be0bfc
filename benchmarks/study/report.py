"""From raw rows to the figures: episodes to a threshold, final score, fluctuation and KL, with 90 % intervals."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .arms import BEST, ORACLE

COLUMNS = ("task", "arm", "seed", "episodes", "score", "kl", "entropy")
LAST = 4  # evaluations that make the final score
SMOOTH = 3  # evaluations that must be over the threshold together
RESAMPLES = 2000

Interval = Sequence[float]  # the center, the lower and the upper end
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


def at_kl(points: np.ndarray, kl: float) -> np.ndarray:
    """Plain PPO's best score at a KL, and what else its points with that score have: on straight lines between the
    points whose score no point at a smaller KL has; flat beyond the ends.

    Args: points (P, 2 or more): KL, score, further figures. Returns: the score and those figures.
    """
    best: list[np.ndarray] = []
    for point in points[np.lexsort(points.T[1::-1])]:  # by KL, then by score
        if not best or point[1] > best[-1][1]:
            best.append(point)
    kls, *figures = np.array(best).T
    return np.array([np.interp(kl, kls, figure) for figure in figures])


def beyond(points: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An arm's means against plain PPO at the arm's mean KL: the differences, and the relative ones.

    Args: points, as for `at_kl`; runs (F, seeds), the same figures of the arm's runs. The points of plain PPO are taken
        as they are; what is drawn again for the 90 % bootstrap interval are the arm's seeds.
    Returns: (F - 1, 3) each: the center and the ends of the interval, for each figure after the KL.
    """
    seeds = runs.shape[1]
    means = runs[:, np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))].mean(2)
    draws = np.concatenate([runs.mean(1, keepdims=True), means], 1)  # the arm itself, then the resamples
    plain = np.stack([at_kl(points, kl) for kl in draws[0]], 1)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.column_stack([values[:, 0], *np.quantile(values[:, 1:], [0.05, 0.95], axis=1)])

    return spread(draws[1:] - plain), spread(draws[1:] / plain - 1)


def task_table(task: str, data: dict[tuple[str, str], Curves], against: str = BEST) -> str:
    """One task's arms as Markdown: each against the best PPO, or another arm that counts as plain PPO."""
    arms = {arm: curves for (name, arm), curves in data.items() if name == task}
    base = arms[against]
    start = float(np.mean([curve[0, 1] for curve in base.values()]))
    threshold = start + 0.8 * (float(np.mean([final_score(curve) for curve in base.values()])) - start)
    measures = (final_score, lambda curve: episodes_to(threshold, curve), fluctuation)
    figures = {
        arm: np.array([[measure(curve) for curve in curves.values()] for measure in (final_kl, *measures)])
        for arm, curves in arms.items()
    }
    plain = [arm for arm in arms if arm.startswith("PPO ") or arm in (BEST, against)]
    points = np.array([figures[arm].mean(1) for arm in plain])
    lines = [
        f"### {task}: threshold {threshold:.3f}, from {start:.3f}",
        "",
        f"| arm | episodes to threshold | fewer than {against} | final | change | fluctuation | change | KL |",
        "|" + "---|" * 8,
    ]
    matched = [
        "At the KL of each arm, against the best of plain PPO there:",
        "",
        "| arm | fewer episodes | final, difference | final, change | fluctuation, change |",
        "|" + "---|" * 5,
    ]
    for arm, own in figures.items():
        if arm.startswith("PPO "):
            continue
        kls, finals, episodes, rough = own.tolist()
        gain, fewer, calmer = (interval(*both) for both in zip(own[1:].tolist(), figures[against][1:].tolist()))
        change = [_percent(_less(fewer)), _percent(gain), _percent(calmer)]
        if arm == against:
            change = ["", "", ""]
        cells = [
            arm,
            _plain(interval(episodes), "{:.0f}"),
            change[0],
            _plain(interval(finals), "{:.3f}"),
            change[1],
            _plain(interval(rough), "{:.3f}"),
            change[2],
            _plain(interval(kls), "{:.1f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
        differences, (gain, fewer, calmer) = beyond(points, own)
        cells = [arm, _percent(_less(fewer)), _plain(differences[0], "{:+.3f}"), _percent(gain), _percent(calmer)]
        matched.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *matched])


def _less(values: Interval) -> Interval:
    """A relative change as a saving."""
    center, low, high = values
    return -center, -high, -low


def _plain(values: Interval, form: str) -> str:
    center, low, high = (form.format(value) for value in values)
    return f"{center} [{low}, {high}]"


def _percent(values: Interval) -> str:
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
