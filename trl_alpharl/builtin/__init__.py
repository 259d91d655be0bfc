"""The embedded default: a tiny language model, its prompts and a reward, made on the spot without a download."""

from importlib import import_module
from typing import Any

_HOMES = {"load_builtin": "pretrain", "builtin_dataset": "dataset", "positive_words": "reward"}


def __getattr__(name: str) -> Any:
    # Resolved on first use: the reward alone must not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["builtin_dataset", "load_builtin", "positive_words"]
