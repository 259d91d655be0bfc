"""Who may import whom. A room is a module or a folder of the package; the table below is the whole rule.

What stands under `lazily` may be imported inside functions only: help, listings and the recipe loader stay fast, and
an optional package is asked for when it is needed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "trl_alpharl"


@dataclass(frozen=True)
class Room:
    """What a room may import: rooms of ours, packages, and either inside functions only or in one file only."""

    ours: str = ""
    packages: str = ""
    lazily: str = ""
    in_one_file: dict[str, str] = field(default_factory=dict)  # package -> the file that may


ROOMS = {
    "__init__": Room(lazily="trainers rewards lowrank"),
    "units": Room(),
    "shapes": Room(),
    "metrics_table": Room(),
    "knobs": Room(),
    "hf_fields": Room(),
    "fields": Room("knobs hf_fields", "yaml"),
    "recipe": Room("knobs fields", "yaml"),
    "records": Room("", "torch"),
    "functional": Room("records shapes", "torch"),
    "lowrank": Room("functional shapes knobs", "torch transformers", in_one_file={"transformers": "callback.py"}),
    "rewards": Room(
        "functional",
        lazily="torch transformers peft vaderSentiment",
        in_one_file={**dict.fromkeys(("torch", "transformers", "peft"), "model.py"), "vaderSentiment": "sentiment.py"},
    ),
    "_trl": Room("", "trl"),
    "rollout": Room("records functional shapes _trl", "torch transformers numpy", in_one_file={"numpy": "vllm.py"}),
    "roles": Room("records functional units", "torch transformers peft safetensors huggingface_hub", "bitsandbytes"),
    "trainers": Room(
        "units shapes metrics_table knobs records functional rewards _trl rollout roles lowrank",
        "torch transformers accelerate peft datasets rich safetensors",
        "wandb",
    ),
    "builtin": Room("", "torch transformers datasets tokenizers tqdm"),
    "pipeline": Room(
        "trainers roles rewards recipe knobs _trl", "torch transformers peft", "builtin datasets bitsandbytes"
    ),
    "reporting": Room("units shapes metrics_table knobs", "rich", "matplotlib"),
    "cli": Room("recipe knobs fields hf_fields metrics_table", "", "pipeline reporting rewards rich torch"),
}


class Import(NamedTuple):
    """One import: the room or package that it names, whether it is one of ours, and where it stands."""

    name: str
    ours: bool
    file: Path
    line: int
    lazy: bool


def imports_of(file: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Every import in a file but those of the standard library, of its own room and of the package's own names."""
    here = [package.name, *file.relative_to(package).parts[:-1]]
    tree = ast.parse(file.read_text(), str(file))

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(here[: len(here) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            yield from ([f"{module}.{alias.name}" for alias in node.names] if module == package.name else [module])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield name.value
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield "__import__"

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in targets(child):
                top, *rest = target.split(".")
                room = rest[0] if top == package.name and rest else None
                if room in ROOMS and room != room_of(file, package):
                    yield Import(room, True, file, child.lineno, lazy)
                elif top != package.name and top not in sys.stdlib_module_names:
                    yield Import(top, False, file, child.lineno, lazy)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from walk(child, lazy or inside or checking)

    yield from walk(tree, False)


def room_of(file: Path, package: Path = PACKAGE) -> str:
    return file.relative_to(package).parts[0].removesuffix(".py")


def is_allowed(found: Import, room: Room) -> bool:
    only = room.in_one_file.get(found.name)
    if only is not None and found.file.name != only:
        return False
    always = room.ours if found.ours else room.packages
    return found.name in always.split() or (found.lazy and found.name in room.lazily.split())


def breaches(package: Path = PACKAGE) -> list[str]:
    return [
        f"{found.file.relative_to(package)}:{found.line} imports {found.name}{'' if found.lazy else ' at its top'}"
        for file in sorted(package.rglob("*.py"))
        for found in imports_of(file, package)
        if not is_allowed(found, ROOMS[room_of(file, package)])
    ]


def test_every_room_has_a_row():
    assert {room_of(file) for file in PACKAGE.rglob("*.py")} == set(ROOMS)


def test_nobody_imports_what_the_table_does_not_allow():
    assert breaches() == []


def test_nobody_imports_the_command_line():
    assert not any("cli" in f"{room.ours} {room.lazily}".split() for room in ROOMS.values())


@pytest.mark.parametrize(
    "room, line, allowed",
    [
        ("functional/x.py", "import transformers", False),
        ("functional/x.py", "from ..trainers.ppo_config import PPOConfig", False),
        ("functional/x.py", "from ..shapes import round_up", True),
        ("rollout/x.py", "from trl import is_conversational", False),
        ("rollout/x.py", "import trl.trainer.utils as utils", False),
        ("rollout/x.py", "def f():\n    from trl.trainer import utils", False),
        ("rollout/x.py", "from .. import lowrank, roles", False),
        ("rewards/model.py", "import torch", False),
        ("rewards/model.py", "def f():\n    import torch", True),
        ("rewards/text.py", "def f():\n    import torch", False),
        ("cli/x.py", "from ..pipeline import run", False),
        ("cli/x.py", "def f():\n    from .. import pipeline", True),
        ("trainers/x.py", "from trl_alpharl.pipeline import run", False),
        ("trainers/x.py", "import importlib\nimportlib.import_module('trl.trainer')", False),
        ("trainers/x.py", "__import__('trl')", False),
        ("knobs/ppo.py", "import torch.nn as nn", False),
        ("knobs/ppo.py", "import dataclasses", True),
        ("__init__.py", "from .rewards.model import RewardModel", False),
        ("__init__.py", "if TYPE_CHECKING:\n    from .rewards.model import RewardModel", True),
    ],
)
def test_this_test_sees_a_breach(tmp_path, room, line, allowed):
    file = tmp_path / "trl_alpharl" / room
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line)
    assert (breaches(tmp_path / "trl_alpharl") == []) is allowed


@pytest.mark.parametrize(
    "modules, absent",
    [
        ("units shapes metrics_table knobs hf_fields fields recipe cli.main reporting.curve", "torch transformers trl"),
        ("functional.logps functional.losses functional.advantages records", "transformers trl accelerate peft"),
        ("rewards rewards.model rewards.combine", "torch transformers trl"),
    ],
)
def test_importing_does_not_bring_along(modules, absent):
    """What the table promises, through all that is imported on the way."""
    names = ", ".join(f"trl_alpharl.{name}" for name in modules.split())
    code = f"import sys, {names}; print(*({set(absent.split())!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
