# ruff: noqa: RUF009
"""A recipe's own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .field import knob


@dataclass
class ScriptKnobs:
    """What a recipe says beside the trainer's fields: data, rewards, model source."""

    method: Literal["ppo", "arpo"] = knob("ppo", "The trainer.")
    dataset_name: str | None = knob(
        None,
        "Hub id, local folder or JSON/JSONL/CSV/Parquet file with a 'prompt' column; 'builtin' is the embedded one.",
    )
    dataset_config: str | None = knob(None, "Configuration of a hub dataset.")
    dataset_train_split: str = knob("train", "Split to train on.")
    dataset_test_split: str | None = knob(None, "Split to evaluate on. None: rows held out from the train split.")
    eval_rows: int = knob(64, "Rows held out for the before/after score when no test split is named.")
    reward_funcs: list[str] | None = knob(
        None, "Rewards by name (trl-alpharl rewards lists them), module.function, or classifier path."
    )
    sample_rows: int = knob(5, "Completions shown in the before/after table.")
