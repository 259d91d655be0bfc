"""The embedded prompts: story openings for the embedded model to go on from."""

from __future__ import annotations

from datasets import Dataset

from trl_alpharl.builtin.corpus import openings

_TRAIN_ROWS, _TEST_ROWS = 512, 64
_SEED = 1


def builtin_dataset() -> tuple[Dataset, Dataset]:
    """512 prompts to train on and 64 others to test on, one text column `prompt` each; always the same rows."""
    prompts = openings(_TRAIN_ROWS + _TEST_ROWS, _SEED)
    train, test = prompts[:_TRAIN_ROWS], prompts[_TRAIN_ROWS:]
    return Dataset.from_dict({"prompt": train}), Dataset.from_dict({"prompt": test})
