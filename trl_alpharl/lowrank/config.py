"""`LowRankConfig`: the low-rank fields, checked, and the rank that they give each matrix."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..knobs import LOWRANK_PREFIX, LowRankKnobs
from ..shapes import recommended_rank, tanh_rank

_FFN, _ATTENTION, _EMBEDDING = "mlp|ffn|feed_forward|expert", "attn|attention", "embed|lm_head|wte|wpe"

# paper: the ranks that the method's description names. energy: what holds 90 % of a policy gradient (docs/low-rank.md).
PRESETS: dict[str, dict[str, int]] = {
    "paper": {_FFN: 128, _ATTENTION: 64, _EMBEDDING: 32},
    "energy": {_FFN: 128, f"({_ATTENTION}).*(o_proj|out_proj|c_proj|dense)": 64, _ATTENTION: 32, _EMBEDDING: 64},
}

# Fields that need moments or accumulators; the callback has neither.
_OPTIMIZER_ONLY = (
    "update_gap",
    "rotate_moments",
    "update",
    "scale",
    "accumulate_in_subspace",
    "norm_sketch",
    "basis_storage",
    "moment_storage",
    "accumulator_storage",
    "plain_storage",
    "stochastic_rounding",
    "all_reduce",
    "all_reduce_rank",
)

# Fields that one choice of another field reads.
_READ_WITH = {
    ("rank_policy", "tanh"): ("tanh_base", "tanh_delta", "tanh_tau"),
    ("rank_policy", "energy"): ("energy", "rank_min", "rank_max"),
    ("all_reduce", "powersgd"): ("all_reduce_rank",),
}


@dataclass
class LowRankConfig(LowRankKnobs):
    """The fields of `knobs.LowRankKnobs`, each described there.

    Raises ValueError with one line that begins with the field, for a value or a combination that cannot work.
    """

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        _check_pattern(self.rank_pattern)
        for clash, reason in (
            (
                self.rank_pattern is not None and self.rank_policy != "fixed",
                f"rank_pattern gives fixed ranks and rank_policy is {self.rank_policy!r}; leave one of them out",
            ),
            (
                self.update == "scaled" and self.accumulate_in_subspace,
                "accumulate_in_subspace: true drops the full gradient, which update: scaled needs",
            ),
            (
                self.all_reduce == "projected" and self.accumulate_in_subspace is False,
                "all_reduce: projected exchanges what accumulate_in_subspace: false never makes",
            ),
            (
                self.update == "scaled" and self.all_reduce == "projected",
                "all_reduce: projected has no full gradient, which update: scaled needs",
            ),
            (self.rank_min > self.rank_max, f"rank_min is {self.rank_min}, above rank_max, {self.rank_max}"),
        ):
            if clash:
                raise ValueError(f"{reason}.")
        _check_read(self)

    @classmethod
    def of(cls, args: Any) -> LowRankConfig:
        """From an object with prefixed fields, such as a PPOConfig; messages name the prefixed field."""
        try:
            return cls(**{f.name: getattr(args, LOWRANK_PREFIX + f.name) for f in dataclasses.fields(LowRankKnobs)})
        except ValueError as error:
            raise ValueError(f"{LOWRANK_PREFIX}{error}") from None

    @property
    def takes_gradients(self) -> bool:
        """Whether the optimizer of one process projects gradients during backward and drops them."""
        return self.update == "adam" if self.accumulate_in_subspace is None else self.accumulate_in_subspace

    def start_rank(self, name: str, model_size: int | None) -> int:
        """The rank of a matrix's first basis; 0: leave it alone.

        Args: name, of the parameter; model_size, hidden size times layers, which the sqrt rule needs.
        """
        if self.rank_policy == "tanh":
            return self.tanh_base
        if self.rank_policy == "sqrt":
            if model_size is None:
                raise ValueError(
                    "rank_policy sqrt: the model's config has no hidden_size and num_hidden_layers; name a rank."
                )
            return recommended_rank(model_size, self.rank)
        pattern = PRESETS[self.rank_pattern] if isinstance(self.rank_pattern, str) else self.rank_pattern or {}
        return next((rank for regex, rank in pattern.items() if re.search(regex, name)), self.rank)

    def scheduled_rank(self, start: int, step: int) -> int:
        """The rank that the schedule gives at an optimizer step; the energy policy decides from gradients instead."""
        if self.rank_policy == "tanh":
            return tanh_rank(step, self.tanh_base, self.tanh_delta, self.tanh_tau)
        return start

    def check_for_callback(self) -> None:
        """Raise ValueError when a field is set that only the optimizer reads."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in _OPTIMIZER_ONLY:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, which only the low-rank optimizer reads; "
                    "the callback keeps no moments. Leave it out."
                )


def _check_choices(config: LowRankConfig) -> None:
    hints = get_type_hints(LowRankKnobs)
    for field in dataclasses.fields(LowRankKnobs):
        kind, value = hints[field.name], getattr(config, field.name)
        choices = next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())
        if choices and value not in choices and not (value is None and type(None) in get_args(kind)):
            raise ValueError(f"{field.name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.")
        for plain, word in ((bool, "true or false"), (int, "a whole number")):
            if kind is plain and type(value) is not plain:
                raise ValueError(f"{field.name} is {value!r}; it must be {word}.")


def _check_ranges(config: LowRankConfig) -> None:
    at_least_one = ("rank", "tanh_base", "rank_min", "rank_max", "norm_sketch", "all_reduce_rank")
    for names, holds, rule in (
        (at_least_one, lambda value: value >= 1, "at least 1"),
        (("tanh_delta", "update_gap"), lambda value: value >= 0, "0 or more"),
        (("tanh_tau", "scale"), lambda value: value > 0, "above 0"),
        (("energy",), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ):
        for name in names:
            value = getattr(config, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
                raise ValueError(f"{name} is {value!r}; it must be {rule}.")


def _check_read(config: LowRankConfig) -> None:
    for (chooser, choice), names in _READ_WITH.items():
        chosen = getattr(config, chooser)
        for name in names:
            if chosen != choice and getattr(config, name) != getattr(LowRankKnobs, name):
                raise ValueError(f"{name} is set, but {chooser} is {chosen!r}; {name} is read with {choice!r}.")


def _check_pattern(pattern: Any) -> None:
    if pattern is None or (isinstance(pattern, str) and pattern in PRESETS):
        return
    if not isinstance(pattern, dict):
        raise ValueError(
            f"rank_pattern is {pattern!r}; it must be a preset ({', '.join(PRESETS)}) or {{pattern: rank}}."
        )
    for regex, rank in pattern.items():
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"rank_pattern: {regex!r} is no regular expression: {error}.") from error
        if type(rank) is not int or rank < 0:
            raise ValueError(f"rank_pattern: {regex!r} has rank {rank!r}; it must be a whole number, 0 or more.")
