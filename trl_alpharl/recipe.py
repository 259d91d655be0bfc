"""Reads a recipe and the flags that change it, strictly and without torch.

A mistake costs a second, not the minutes after which a trainer would notice it, and it is one line that says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from .fields import FIELDS, SECTIONS, Field, ValueProblem, mapping_items, read_value, takes
from .knobs import COMPUTED, OTHER_NAMES


class RecipeError(ValueError):
    """A mistake in a recipe or in its flags: one line with file and line number, the field, what is wrong."""


@dataclass(frozen=True)
class Recipe:
    """A checked run: only the fields that the file or the flags gave, typed; a flag wins over the file."""

    name: str  # `task/method_model` of a shipped recipe, else the file's stem
    path: Path
    values: Mapping[str, Any]

    def section(self, name: str) -> dict[str, Any]:
        """The values for one object: `ppo` (PPOConfig), `arpo` (what ARPOConfig takes beside them), `model` (TRL's
        ModelConfig) or `script` (ScriptKnobs)."""
        if name not in SECTIONS:
            raise ValueError(f"section: found '{name}', expected one of {', '.join(SECTIONS)}")
        return {key: value for key, value in self.values.items() if FIELDS[key].section == name}


def load_recipe(path_or_name: str, flags: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by name, and the flags `--key value` after it.

    A `dataset_name` in the file may name a data file beside the recipe. Raises RecipeError.
    """
    path = find_recipe(path_or_name)
    written = _read_file(path)
    if "method" not in written:
        raise RecipeError(f"{path}: method: missing, expected a line such as 'method: ppo'")
    beside = path.parent / (written.get("dataset_name") or "")
    if beside.is_file():
        written["dataset_name"] = str(beside.resolve())
    recipe = Recipe(_name_of(path), path, {**written, **_read_flags(flags)})
    if recipe.values["method"] != "arpo" and recipe.section("arpo"):
        raise RecipeError(f"{path}: {next(iter(recipe.section('arpo')))}: only 'method: arpo' has this field")
    return recipe


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name, sorted."""
    folder = _shipped_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(path_or_name: str) -> Path:
    """The file at a path, else the shipped recipe of that name, with or without `recipes/` and `.yaml`."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    name = path_or_name.removeprefix("recipes/").removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    raise RecipeError(f"{path_or_name}: no such file or shipped recipe; {_hint(name, shipped, 'recipes')}")


def _shipped_folder() -> Path:
    spec = find_spec("trl_alpharl.recipes")
    if spec and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return Path(__file__).parents[1] / "recipes"  # a source checkout that is not installed


def _name_of(path: Path) -> str:
    folder = _shipped_folder().resolve()
    inside = path.resolve().is_relative_to(folder)
    return path.resolve().relative_to(folder).with_suffix("").as_posix() if inside else path.stem


def _hint(name: str, known: Mapping[str, Any], command: str) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"'trl-alpharl {command}' lists them"


def _field(name: str, node: yaml.Node) -> Field:
    if name in COMPUTED:
        raise ValueProblem(f"{name}: computed from other fields and cannot be set; leave it out", node)
    if name in OTHER_NAMES:
        raise ValueProblem(f"{name}: unknown field; here it is called {OTHER_NAMES[name]}", node)
    if name not in FIELDS:
        raise ValueProblem(f"{name}: unknown field; {_hint(name, FIELDS, 'train --help-all')}", node)
    return FIELDS[name]


class _Loader(yaml.SafeLoader):
    """Plain values only. An anchor, an alias or a tag changes what a line means far away from it."""

    def compose_node(self, parent, index):
        event = self.peek_event()
        for kind in ("anchor", "tag"):
            if getattr(event, kind, None):
                raise yaml.composer.ComposerError(None, None, f"{kind}s are not supported", event.start_mark)
        return super().compose_node(parent, index)


def _compose(text: str, prefix: str = "") -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueProblem(
            f"{prefix}not valid YAML: {error.problem}", yaml.ScalarNode("", "", error.problem_mark)
        ) from error
    except yaml.reader.ReaderError as error:
        raise ValueProblem(f"{prefix}not valid YAML: {error.reason}", yaml.ScalarNode("", "")) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    try:
        root = _compose(text)
        if not isinstance(root, yaml.MappingNode):
            raise RecipeError(f"{path}: found no fields, expected lines such as 'method: ppo'")
        return {name: read_value(node, _field(name, key)) for name, key, node in mapping_items(root)}
    except ValueProblem as problem:
        mark = problem.node.start_mark
        raise RecipeError(f"{path}:{mark.line + 1}: {problem}" if mark else f"{path}: {problem}") from problem


def _read_flags(flags: Sequence[str]) -> dict[str, Any]:
    try:
        return {name: _flag_value(name, times) for name, times in _split(flags).items()}
    except ValueProblem as problem:
        raise RecipeError(f"command line: {problem}") from problem


def _split(flags: Sequence[str]) -> dict[str, list[list[str]]]:
    """Each flag's words, one list for every time that it is given. One dash starts a word: a negative number."""
    given: dict[str, list[list[str]]] = {}
    words: list[str] | None = None
    for token in flags:
        if token.startswith("--"):
            name, equals, word = token[2:].partition("=")
            words = [word] if equals else []
            given.setdefault(name.replace("-", "_"), []).append(words)
        elif words is None:
            raise RecipeError(f"command line: found '{token}', expected a flag such as --seed 1")
        else:
            words.append(token)
    return given


def _flag_value(name: str, times: list[list[str]]) -> Any:
    """A flag's typed value: `--key value`, a bare `--switch`, `--key a b`, `--key '[a, b]'`, `--key '{"a": 1}'`."""
    here = yaml.ScalarNode("", "")
    field = _field(name, here)
    if takes(field.kind, bool) and times == [[]]:
        return True
    if not all(times):
        raise ValueProblem(f"{name}: found no value after the flag", here)
    words = [word for time in times for word in time]
    if takes(field.kind, list):
        return read_value(_list_node(words, f"{name}: "), field)
    if len(words) > 1:
        raise ValueProblem(f"{name}: found {len(words)} values ({' '.join(words)}), expected one", here)
    if takes(field.kind, dict) and words[0].startswith("{"):
        return read_value(_compose(words[0], f"{name}: "), field)
    return read_value(yaml.ScalarNode("", words[0]), field)


def _list_node(words: list[str], prefix: str) -> yaml.Node:
    nodes = [_compose(word, prefix) if word.startswith("[") else yaml.ScalarNode("", word) for word in words]
    if len(nodes) == 1:
        return nodes[0]
    flat = [child for node in nodes for child in (node.value if isinstance(node, yaml.SequenceNode) else [node])]
    return yaml.SequenceNode("", flat)
