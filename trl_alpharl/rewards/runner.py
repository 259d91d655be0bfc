"""Calls reward functions as TRL does and checks what they return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# TRL leaves these dataset columns out: they are what `prompts`, `completions` and `completion_ids` replace.
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class RewardTable:
    """What F reward functions say about B completions."""

    names: list[str]  # F, unique, without "/"
    values: list[list[float]]  # B x F; NaN where not given
    given: list[list[bool]]  # B x F; False where the function returned None. A given NaN is a fault


class RewardRunner:
    """Reward functions with their names and weights; calling it scores one batch of completions.

    A function may be sync or async, an object with `__call__`, a `functools.partial` or a `RewardModel`. The async
    ones run together. A function without `**kwargs` gets only the arguments that it names.
    `weights`: one a function, None means 1 each. `names`: for the metrics; None takes the functions' own.
    Raises `ValueError` when there is no function, one cannot be called, or weights or names are not as many.
    """

    def __init__(
        self,
        reward_funcs: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not reward_funcs:
            raise ValueError("reward_funcs is empty; at least one reward function is needed.")
        for at, function in enumerate(reward_funcs):
            if not callable(function) or isinstance(function, type):
                found = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
                raise ValueError(f"reward_funcs[{at}] is {found}; a function or a callable object is needed.")
        for field, given in (("reward_weights", weights), ("names", names)):
            if given is not None and len(given) != len(reward_funcs):
                raise ValueError(f"{field} has {len(given)} entries for {len(reward_funcs)} reward functions.")
        self.reward_funcs = list(reward_funcs)
        self.weights = [1.0] * len(self.reward_funcs) if weights is None else [float(weight) for weight in weights]
        self.names = _unique([reward_name(function) for function in self.reward_funcs] if names is None else names)

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]] | None,
        columns: dict[str, list],
        extras: dict[str, Any] | None = None,
    ) -> RewardTable:
        """Score B completions. `columns`: dataset columns, B entries each; `extras`: what a trainer adds
        (`trainer_state`, `log_extra`, `log_metric`).

        Raises `ValueError` naming the function for a missing argument, a wrong number of rewards or an entry that is
        no number; exceptions of a reward function pass through with a note that names it.
        """
        arguments = {key: value for key, value in {**columns, **(extras or {})}.items() if key not in NOT_COLUMNS}
        arguments |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        outputs = self._call_all(arguments)
        by_function = [_as_floats(name, output, len(completions)) for name, output in zip(self.names, outputs)]
        rows = [list(row) for row in zip(*by_function, strict=True)]
        return RewardTable(
            names=list(self.names),
            values=[[math.nan if value is None else value for value in row] for row in rows],
            given=[[value is not None for value in row] for row in rows],
        )

    def _call_all(self, arguments: dict[str, Any]) -> list[Any]:
        outputs: list[Any] = []
        try:
            for name, function in zip(self.names, self.reward_funcs):
                chosen = {key: _own_copy(value) for key, value in _arguments_for(name, function, arguments).items()}
                with _naming(name):
                    outputs.append(function(**chosen))
        except BaseException:
            for output in outputs:
                if inspect.iscoroutine(output):
                    output.close()  # else Python warns that it was never awaited
            raise
        waiting = {at: output for at, output in enumerate(outputs) if inspect.isawaitable(output)}
        if waiting:
            for at, result in zip(waiting, _await_together([*waiting.values()])):
                with _naming(self.names[at]):
                    if isinstance(result, BaseException):
                        raise result
                outputs[at] = result
        return outputs


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the reward function's name to an exception that leaves the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in reward function {name!r}")
        raise


def reward_name(function: Callable[..., Any]) -> str:
    """A function's `__name__`, an object's class name, a reward model's folder; a partial has its function's."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _unique(names: Sequence[str]) -> list[str]:
    taken: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name}_{count}"
        taken.append(candidate)
    return taken


def _arguments_for(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C do not tell
        return arguments
    named = [parameter for parameter in parameters if parameter.kind not in STARRED]
    for parameter in named:
        if parameter.default is inspect.Parameter.empty and parameter.name not in arguments:
            raise ValueError(
                f"reward function {name!r} needs a column {parameter.name!r}, which the dataset does not have; "
                f"it can take: {', '.join(arguments)}."
            )
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    return {parameter.name: arguments[parameter.name] for parameter in named if parameter.name in arguments}


def _own_copy(value: Any) -> Any:
    """Lists and dicts anew, what is in them as it is: a function may change what it is given (strip a completion, pop
    an answer) without the next one, or the table of samples, seeing that."""
    if type(value) is list:
        return [_own_copy(entry) for entry in value]
    if type(value) is dict:
        return {key: _own_copy(entry) for key, entry in value.items()}
    return value


def _as_floats(name: str, output: Any, rows: int) -> list[float | None]:
    output = output.tolist() if hasattr(output, "tolist") else output  # a numpy array or a tensor
    if not isinstance(output, (list, tuple)):
        raise ValueError(
            f"reward function {name!r} returned {type(output).__name__}; a list of {rows} rewards is needed."
        )
    if len(output) != rows:
        raise ValueError(f"reward function {name!r} returned {len(output)} rewards for {rows} completions.")
    return [None if entry is None else _as_float(name, at, entry) for at, entry in enumerate(output)]


def _as_float(name: str, row: int, entry: Any) -> float:
    try:
        if not hasattr(entry, "__float__"):  # a string would pass float()
            raise TypeError
        return float(entry)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"reward function {name!r} returned {type(entry).__name__} in row {row}; a number or None is needed."
        ) from None


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the whole process, in its own thread.

    It stays open between calls because a user's HTTP client is tied to the loop it first ran in, and being in another
    thread it works where a loop already runs (notebooks).
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trl-alpharl rewards", daemon=True).start()
    return loop


def _await_together(awaitables: list[Awaitable[Any]]) -> list[Any]:
    """Results or exceptions of the awaitables, in their order."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*awaitables, return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(gather(), _loop())
    try:
        return future.result()
    except BaseException:  # the user's interrupt: do not leave requests running
        future.cancel()
        raise


__all__ = ["RewardRunner", "RewardTable", "reward_name"]
