"""Everything that a recipe or a flag may say, and how written text becomes a typed value. No torch.

YAML decides a scalar's type by its look: `no` is False and `1e-3` is text. Here the field decides: `eval_strategy: no`
is the text "no", `use_peft: no` is False, `learning_rate: 1e-3` is a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from .hf_fields import ModelFields, TrainingFields
from .knobs import ARPOKnobs, PPOKnobs, PrefixedLowRankKnobs, ScriptKnobs

SECTIONS = ("ppo", "arpo", "model", "script")
_SOURCES: dict[type, str] = {
    PPOKnobs: "ppo",
    ARPOKnobs: "arpo",
    PrefixedLowRankKnobs: "ppo",
    ScriptKnobs: "script",
    ModelFields: "model",
    TrainingFields: "ppo",
}

_NULL = ("", "~", "null", "Null", "NULL")
_NONE = (*_NULL, "none", "None", "NONE")
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)
_FLOAT = re.compile(r"[+-]?((\d+(_\d+)*(\.\d*)?|\.\d+)(e[+-]?\d+)?|\.?inf)", re.ASCII | re.IGNORECASE)


class Field(NamedTuple):
    """One name that a recipe may use."""

    name: str
    kind: Any  # str, int | None, Literal["k1", "k2"], list[str], dict, ...
    default: Any
    help: str
    section: str  # the object that takes it: one of SECTIONS


class ValueProblem(ValueError):
    """A written name or value that cannot stand there; `node` is the place."""

    def __init__(self, message: str, node: Node):
        super().__init__(message)
        self.node = node


def fields_of(source: type) -> list[Field]:
    """The fields of one of the dataclasses that the catalogue is made of, in their order."""
    kinds = get_type_hints(source)
    return [
        Field(f.name, kinds[f.name], f.default, f.metadata["help"], _SOURCES[source])
        for f in dataclasses.fields(source)
    ]


FIELDS: dict[str, Field] = {f.name: f for source in _SOURCES for f in fields_of(source)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, None among them, or the kind alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def takes(kind: Any, base: type) -> bool:
    """Whether a field of this kind takes a list, a dict, a bool, ... (`base`)."""
    return any((get_origin(member) or member) is base for member in alternatives(kind))


def describe(kind: Any) -> str:
    """The kind in words, for messages."""
    words = []
    for member in alternatives(kind):
        if get_origin(member) is Literal:
            choices = [str(choice) for choice in get_args(member)]
            words.append(f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
        elif get_origin(member) is list:
            words.append("a list of " + {str: "texts", float: "numbers"}[get_args(member)[0]])
        else:
            words.append(_WORDS[member])
    return " or ".join(words)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping such as {key: value}",
    NoneType: "none",
}


def read_value(node: Node, field: Field) -> Any:
    """The field's typed value written at a YAML node; ValueProblem says what was found and what the field takes.

    A union takes the first member that fits. One value is read as a list of one. Quotes matter only for `none`, which
    is text when quoted.
    """
    try:
        return _read(node, field.kind)
    except ValueProblem as problem:
        raise ValueProblem(f"{field.name}: {problem}", problem.node) from None


def _read(node: Node, kind: Any) -> Any:
    members = alternatives(kind)
    if NoneType in members and isinstance(node, ScalarNode) and not node.style and node.value in _NONE:
        return None
    for member in members:
        try:
            return _read_as(node, member)
        except _Misfit:
            continue
    raise ValueProblem(f"found {_found(node)}, expected {describe(kind)}", node)


class _Misfit(Exception):
    """The node is not a value of the member tried; another member may fit."""


def _read_as(node: Node, member: Any) -> Any:
    base = get_origin(member) or member
    if base is list and not isinstance(node, MappingNode):
        (item,) = get_args(member)
        return [_read(child, item) for child in (node.value if isinstance(node, SequenceNode) else [node])]
    if base is dict and isinstance(node, MappingNode):
        return _guess(node)
    if base in (list, dict, NoneType) or not isinstance(node, ScalarNode):
        raise _Misfit
    if base is str and not node.style and node.value in _NULL:
        raise _Misfit
    if base is Literal:
        for choice in get_args(member):
            if str(choice) == node.value:
                return choice
        raise _Misfit
    return {bool: _bool, int: _int, float: _float, str: str}[base](node.value)


def _bool(text: str) -> bool:
    if text.lower() not in _BOOLS:
        raise _Misfit
    return _BOOLS[text.lower()]


def _int(text: str) -> int:
    """`12`, `10_000` and `1e5`, but neither `3.7` nor `3.0`."""
    if _INT.fullmatch(text):
        return int(text)
    if "e" in text.lower() and _FLOAT.fullmatch(text) and float(text).is_integer():
        return int(float(text))
    raise _Misfit


def _float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise _Misfit
    return float(text.lower().replace(".inf", "inf"))


def mapping_items(node: MappingNode) -> Iterator[tuple[str, Node, Node]]:
    """Name, key node and value node of each entry; ValueProblem for a name given twice or a name that is not text."""
    first: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise ValueProblem("found a list or a mapping as a name, expected text", key)
        if key.value in first:
            raise ValueProblem(f"{key.value}: given twice, first in line {first[key.value]}", key)
        first[key.value] = key.start_mark.line + 1
        yield key.value, key, value


def _guess(node: Node) -> Any:
    """A value inside a mapping that has no declared types: numbers and the usual words, else text."""
    if isinstance(node, MappingNode):
        return {name: _guess(value) for name, _, value in mapping_items(node)}
    if isinstance(node, SequenceNode):
        return [_guess(child) for child in node.value]
    if node.style:
        return node.value
    if node.value in _NULL:
        return None
    for reader in (_bool, _int, _float):
        try:
            return reader(node.value)
        except _Misfit:
            continue
    return node.value


def _found(node: Node) -> str:
    if isinstance(node, SequenceNode):
        return "a list"
    if isinstance(node, MappingNode):
        return "a mapping"
    return f"'{node.value}'" if node.value else "nothing"
