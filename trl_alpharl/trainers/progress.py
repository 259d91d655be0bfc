"""A progress bar that says how the run goes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback


class RunProgress(TrainerCallback):
    """One bar over the optimizer steps with the latest score, KL and entropy, or a line a log where the output is no
    terminal; quiet on all but the main process."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._terminal = Console().is_terminal
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
        )
        self._bar.start()
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step, latest="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._bar is not None and logs and "objective/scores" in logs:
            score, kl, entropy = (logs[f"objective/{name}"] for name in ("scores", "kl", "entropy"))
            latest = f"score {score:.3f}  KL {kl:.2f}  entropy {entropy:.1f}"
            self._bar.update(self._task, latest=latest)
            if not self._terminal:  # a bar leaves nothing in a log file
                print(f"step {state.global_step}/{state.max_steps}  {latest}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
