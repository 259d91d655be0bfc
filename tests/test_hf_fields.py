"""The table is a copy; here it is held against the classes that it copies."""

from __future__ import annotations

import dataclasses
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import transformers
from trl import ModelConfig

from trl_alpharl.fields import FIELDS, alternatives, fields_of
from trl_alpharl.hf_fields import ModelFields, TrainingFields
from trl_alpharl.trainers.ppo_config import PPOConfig

pytestmark = pytest.mark.trl_compat

NOT_WRITABLE = {"parallelism_config"}  # an object; the trainer refuses it
# We take more than the annotation: scripts pass True for "the newest checkpoint"; a list may be none.
WIDER = {"resume_from_checkpoint": {bool}, "include_for_metrics": {NoneType}}
COPIES = [(ModelFields, ModelConfig), (TrainingFields, PPOConfig)]


def installed_fields(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def bases(kind: Any) -> set[type]:
    """The plain types that a value of this kind may have."""
    found: set[type] = set()
    for member in alternatives(kind):
        if get_origin(member) is Literal:
            found |= {type(choice) for choice in get_args(member)}
        elif isinstance(member, type) and issubclass(member, Enum):
            found.add(str)
        else:
            found.add(get_origin(member) or member)
    return found


def choices(kind: Any) -> set[str]:
    """The words that a Literal or an enumeration in this kind allows."""
    found: set[str] = set()
    for member in alternatives(kind):
        if get_origin(member) is Literal:
            found |= {choice for choice in get_args(member) if isinstance(choice, str)}
        elif isinstance(member, type) and issubclass(member, Enum):
            found |= {choice.value for choice in member}
    return found


@pytest.mark.parametrize(("copy", "original"), COPIES)
def test_names_types_and_defaults_are_those_of_the_installed_class(copy, original):
    installed, hints = installed_fields(original), get_type_hints(original)
    for field in fields_of(copy):
        assert field.name in installed, f"{field.name} is gone from {original.__name__}"
        allowed = bases(hints[field.name]) | WIDER.get(field.name, set())
        assert bases(field.kind) <= allowed, field.name
        default = installed[field.name].default
        if default is dataclasses.MISSING:
            default = installed[field.name].default_factory() or None
        assert field.default == (default.value if isinstance(default, Enum) else default), field.name


@pytest.mark.parametrize(("copy", "original"), COPIES)
def test_choices_are_those_of_the_installed_class(copy, original):
    installed, hints = installed_fields(original), get_type_hints(original)
    narrowed = 0
    for field in fields_of(copy):
        ours = choices(field.kind)
        theirs = set(installed[field.name].metadata.get("choices") or ()) | choices(hints[field.name])
        if ours and theirs:
            assert ours == theirs, field.name
            narrowed += 1
    assert narrowed >= 2


def test_no_field_of_the_tested_transformers_is_missing():
    new = installed_fields(transformers.TrainingArguments).keys() - FIELDS.keys() - NOT_WRITABLE
    new |= installed_fields(ModelConfig).keys() - FIELDS.keys()
    if new and not transformers.__version__.startswith("5.24."):
        pytest.skip(f"transformers {transformers.__version__} has new fields that recipes do not know: {sorted(new)}")
    assert not new
