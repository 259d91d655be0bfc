"""The text of `train --help`: every field of a recipe with its values, meaning and default."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ..fields import Field, alternatives, fields_of
from ..hf_fields import ModelFields, TrainingFields
from ..knobs import WRITTEN_IN, ARPOKnobs, PPOKnobs, PrefixedLowRankKnobs, ScriptKnobs

_USAGE = """\
usage: trl-alpharl train RECIPE [--field value ...]

RECIPE is a YAML file or a shipped recipe ('trl-alpharl recipes' lists them). Each field below may stand in the file
as `field: value` or on the command line as `--field value`, which wins. A list takes several values: --field a b.
A true/false field alone means true. Optional fields take none."""

_MORE = "'trl-alpharl train --help-all' adds the fields of transformers' TrainingArguments, which a recipe takes too."

_METAVARS = {bool: "true|false", int: "N", float: "X", str: "TEXT", list: "VALUE ...", dict: "{KEY: VALUE}"}


def train_help(everything: bool = False) -> str:
    """Usage and fields, grouped; with `everything` the TrainingArguments too."""
    sources = {
        "RECIPE": ScriptKnobs,
        "TRAINER": PPOKnobs,
        "TRAINER, with method: arpo": ARPOKnobs,
        "LOW-RANK GRADIENTS": PrefixedLowRankKnobs,
        "MODEL, as TRL's ModelConfig": ModelFields,
    }
    if everything:
        sources["TRAINING, as transformers' TrainingArguments"] = TrainingFields
    width = min(shutil.get_terminal_size((120, 40)).columns, 120)
    parts = [_USAGE]
    for title, source in sources.items():
        parts.append(title)
        for group, fields in _groups(source).items():
            heading = [f"{group}:"] if group else []
            parts.append("\n".join([*heading, *(_entry(field, width) for field in fields)]))
    return "\n\n".join(parts if everything else [*parts, _MORE])


def _groups(source: type) -> dict[str, list[Field]]:
    """The fields under the comment lines that head them in their class; that way the class alone says the order."""
    fields = {field.name: field for field in fields_of(source)}
    groups: dict[str, list[Field]] = {}
    group = ""
    for written, prefix in WRITTEN_IN.get(source, ((source, ""),)):
        for line in inspect.getsource(written).splitlines():
            if comment := re.fullmatch(r"    # (.+)", line):
                group = comment[1]
            elif (name := re.match(r"    (\w+): ", line)) and prefix + name[1] in fields:
                groups.setdefault(group, []).append(fields[prefix + name[1]])
    return groups


def _entry(field: Field, width: int) -> str:
    text = f"{field.help} [{_shown(field.default)}]"
    filled = textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return f"  --{field.name} {_metavar(field.kind)}\n{filled}"


def _metavar(kind: Any) -> str:
    shown = []
    for member in alternatives(kind):
        if get_origin(member) is Literal:
            shown.append("|".join(map(str, get_args(member))))
        elif member is not NoneType:
            shown.append(_METAVARS[get_origin(member) or member])
    return " or ".join(shown)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return {None: "none", "": "empty"}.get(default, str(default))
