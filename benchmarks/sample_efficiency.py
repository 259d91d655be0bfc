"""Which of ARPO's mechanisms learn from fewer episodes than a tuned PPO, on six small tasks.

    python benchmarks/sample_efficiency.py [--out FOLDER] [--tasks sparse dense ...] [--hours 2] [--trainer] [--quick]

For each task, 16 PPO configurations (learning rate x mini-batches x Adam's beta2 x KL coefficient) run on 5 seeds; the
best of them, the presets and each mechanism on top of the best then run on 5 fresh seeds, all in the same budget of
episodes. FOLDER gets rows.csv (every evaluation of every run; also packed, as rows.csv.gz), report.md and curves.png. A
call goes on where the last one stopped, from the packed rows where only these are there; --hours ends it at the next
cell. --trainer repeats three presets through ARPOTrainer on two tasks x 3 seeds. --quick is the same on two tasks, with
a short budget and two seeds: it shows that the script works, no more.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import arms, report
from study.loop import Study
from study.stacked import pretrained
from study.tasks import TASKS, Task

ROLLOUTS, QUICK_ROLLOUTS = 20, 4
BRIDGED = ("sparse", "dense")
TRAINER = "through ARPOTrainer: "


def run_cell(task: Task, model: Any, settings: dict[str, Any], seeds: list[int], rollouts: int) -> list[dict[str, Any]]:
    """All seeds of one configuration."""
    return Study(task, arms.config(task, rollouts, **settings), model, seeds, rollouts).train()


def best_of(data: dict[tuple[str, str], report.Curves], task: str, points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of the PPO with the highest mean final score."""
    means = {arm: np.mean([report.final_score(curve) for curve in data[task, arm].values()]) for arm in points}
    return points[max(means, key=means.get)]


class Budget:
    """Raises TimeoutError before a cell that begins after the time is over."""

    def __init__(self, hours: float) -> None:
        self.end = time.monotonic() + 3600 * hours

    def check(self) -> None:
        """Call before each cell."""
        if time.monotonic() > self.end:
            raise TimeoutError


def run_task(name: str, out: Path, budget: Budget, quick: bool) -> None:
    """The cells of one task that are not in rows.csv yet."""
    task = TASKS[name]()
    model = pretrained(task, out / "pretrained", steps=40 if quick else 400)
    rollouts = QUICK_ROLLOUTS if quick else ROLLOUTS
    points = arms.grid(task)
    tuning, fresh = arms.TUNING_SEEDS, arms.FRESH_SEEDS
    if quick:
        points, tuning, fresh = dict(list(points.items())[:2]), tuning[:2], fresh[:2]

    def finish(cells: dict[str, dict[str, Any]], seeds: list[int]) -> None:
        for arm, settings in cells.items():
            if (name, arm) in report.read_rows(out / "rows.csv"):
                continue
            budget.check()
            start = time.monotonic()
            rows = run_cell(task, model, settings, seeds, rollouts)
            report.append_rows(out / "rows.csv", name, arm, rows)
            print(f"{name}: {arm}: {time.monotonic() - start:.0f} s", flush=True)

    finish(points, tuning)
    chosen = arms.against(task, best_of(report.read_rows(out / "rows.csv"), name, points))
    finish(dict(list(chosen.items())[:4]) if quick else chosen, fresh)


def run_trainer(out: Path, budget: Budget) -> None:
    """Three presets through ARPOTrainer, beside the loop's."""
    from study.bridge import train

    for name in BRIDGED:
        task = TASKS[name]()
        points = arms.grid(task)
        best = best_of(report.read_rows(out / "rows.csv"), name, points)
        wanted = {arm: arms.against(task, best)[arm] for arm in (arms.BEST, "tuned", "paper")}
        for arm, settings in wanted.items():
            if (name, TRAINER + arm) in report.read_rows(out / "rows.csv"):
                continue
            budget.check()
            rows = []
            for seed in arms.FRESH_SEEDS[:3]:
                model = pretrained(task, out / "pretrained")
                with tempfile.TemporaryDirectory() as folder:
                    rows += train(task, arms.config(task, ROLLOUTS, **settings), model, seed, Path(folder))
            report.append_rows(out / "rows.csv", name, TRAINER + arm, rows)
            print(f"{name}: {TRAINER}{arm}", flush=True)


def write_report(out: Path, command: str) -> str:
    """report.md and curves.png of the tasks that are finished, and the packed rows."""
    (out / "rows.csv.gz").write_bytes(gzip.compress((out / "rows.csv").read_bytes(), mtime=0))
    data = report.read_rows(out / "rows.csv")
    tables = [report.task_table(name, data) for name in TASKS if (name, "paper") in data]
    if ("multi", arms.ORACLE) in data:
        tables.append(report.task_table("multi", data, arms.ORACLE))
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    text = "\n\n".join([f"`{command}`, {versions}. Brackets: 90 % bootstrap intervals over seeds.", *tables]) + "\n"
    (out / "report.md").write_text(text)
    if tables:
        report.draw(data, out / "curves.png")
    return text


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sample_efficiency"))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=None)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    out = options.out / "quick" if options.quick else options.out
    if (out / "rows.csv.gz").is_file() and not (out / "rows.csv").is_file():
        (out / "rows.csv").write_bytes(gzip.decompress((out / "rows.csv.gz").read_bytes()))
    budget = Budget(options.hours)
    command = "python benchmarks/sample_efficiency.py" + (" --quick" if options.quick else "")
    try:
        for name in options.tasks or (BRIDGED if options.quick else TASKS):
            run_task(name, out, budget, options.quick)
        if options.trainer and not options.quick:
            run_trainer(out, budget)
    except TimeoutError:
        print(f"stopped after {options.hours:g} hours; the same command goes on")
    if (out / "rows.csv").is_file():
        print(write_report(out, command))


if __name__ == "__main__":
    main()
