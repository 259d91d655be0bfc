"""Rewards: text in, floats out, with TRL's reward-function signature, so that GRPO can use them unchanged.

    reward_func(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]

Prompts and completions are strings, or lists of messages for chat data; `None` for a row means "no opinion".
To add one: a file here and a line in `REWARD_FUNCS`. A `prepare()` in the file runs when the reward is asked for, to
fail then and not at the first score.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

# name -> "module:function"; nothing is imported before it is asked for.
REWARD_FUNCS: dict[str, str] = {
    "exact_match": "trl_alpharl.rewards.exact_match:exact_match",
    "positive_words": "trl_alpharl.builtin.reward:positive_words",
    "vader_sentiment": "trl_alpharl.rewards.sentiment:vader_sentiment",
}


def get_reward(name: str) -> Callable[..., Any]:
    """The reward called `name`: a name of `REWARD_FUNCS`, `module.function` of an importable or local module, or the
    folder or hub id (with its "/") of a sequence classifier.

    Raises `ValueError`, in one line, when there is no such reward, and `ImportError` when one of `REWARD_FUNCS` needs a
    package that is missing; errors inside the module pass through.
    """
    if name in REWARD_FUNCS:
        path, _, attribute = REWARD_FUNCS[name].partition(":")
        shipped = importlib.import_module(path)
        if hasattr(shipped, "prepare"):
            shipped.prepare()
        return getattr(shipped, attribute)
    if "/" in name or os.path.isdir(name):
        from .model import load_reward_model

        return load_reward_model(name)
    module, _, attribute = name.rpartition(".")
    reward = getattr(_import_module(module, name), attribute, None) if module else None
    if reward is None:
        raise ValueError(_unknown(name))
    if not callable(reward):
        raise ValueError(f"reward {name!r} is of type {type(reward).__name__}; a function is needed.")
    return reward


def _import_module(module: str, name: str) -> Any:
    # A console script does not have the working directory on its path, where a user's own rewards usually lie.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(_unknown(name)) from None
        raise


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, REWARD_FUNCS, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    known = ", ".join(REWARD_FUNCS)
    return f"no reward is called {name!r};{hint} Known: {known}; or give module.function or a classifier's path."


__all__ = ["REWARD_FUNCS", "get_reward"]
