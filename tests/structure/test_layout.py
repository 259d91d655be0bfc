"""How files are named, how long they may be, where their tests are, what they say of themselves, and a few habits."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_alpharl"
LONGEST = 400

# Source files without a test file of the same name, and where their tests are.
TESTED_ELSEWHERE = {
    "_trl.py": "test_trl_door.py",
    "records.py": "trainers/test_arithmetic.py",  # declarations; every stage takes and gives them
    "knobs/field.py": "trainers/test_ppo_config.py",
    "knobs/ppo.py": "trainers/test_ppo_config.py",
    "knobs/arpo.py": "trainers/test_arpo_config.py",
    "knobs/lowrank.py": "lowrank/test_config.py",
    "knobs/script.py": "cli/test_field_help.py",
    "metrics_table.py": "trainers/test_metrics.py",
    "cli/listing.py": "cli/test_listings.py",
    "cli/metrics.py": "cli/test_listings.py",
    "cli/recipes.py": "cli/test_listings.py",
    "cli/rewards.py": "cli/test_listings.py",
    "roles/trainer_face.py": "roles/test_actor_critic.py",
    "trainers/ppo_trainer.py": "trainers/test_swap_in.py",
    "trainers/trainer_hooks.py": "trainers/test_swap_in.py",
}


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


EVERY_FILE = python_files("trl_alpharl", "tests", "benchmarks")


def short(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", EVERY_FILE, ids=short)
def test_no_file_has_a_name_of_the_standard_library_or_of_no_subject(file):
    """A `profile.py` beside a script breaks torch.compile; a `utils.py` grows."""
    names = {file.stem, *(part for part in file.relative_to(ROOT).parts[1:-1])}
    assert not names & (sys.stdlib_module_names - {"__init__"})
    assert not names & {"utils", "util", "helpers", "misc", "common"}


@pytest.mark.parametrize("file", EVERY_FILE, ids=short)
def test_a_file_can_be_read_in_a_sitting(file):
    assert len(file.read_text().splitlines()) <= LONGEST


def test_every_source_file_has_its_tests_at_the_same_place():
    missing = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE)
        if file.name != "__init__.py":
            mirror = TESTED_ELSEWHERE.get(name.as_posix(), name.with_name(f"test_{name.name}"))
            if not (ROOT / "tests" / mirror).is_file():
                missing.append(name.as_posix())
    assert missing == []


def test_no_exception_outlives_its_reason():
    for name, tests in TESTED_ELSEWHERE.items():
        assert (PACKAGE / name).is_file() and (ROOT / "tests" / tests).is_file()
        own = (ROOT / "tests" / name).with_name(f"test_{Path(name).name}")
        assert not own.is_file(), f"{name} has a test file of its own; take it off the list"


# ---- Docstrings ------------------------------------------------------------------------------------------------------


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring. Overloads of a documented protocol (dunder
    methods, and the `on_*` events of a transformers callback) need none."""
    if tree.body and ast.get_docstring(tree) is None:
        yield "the module"

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if child.name.startswith(("_", "on_")):
                continue
            if ast.get_docstring(child) is None and not is_stub(child):
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(tree, "")


def is_stub(node: ast.AST) -> bool:
    """A method of a Protocol: its class says what it is for."""
    return len(node.body) == 1 and isinstance(node.body[0], ast.Expr) and ast.unparse(node.body[0]) == "..."


@pytest.mark.parametrize("file", python_files("trl_alpharl", "benchmarks"), ids=short)
def test_every_public_thing_says_what_it_is(file):
    assert list(undocumented(ast.parse(file.read_text()))) == []


def test_undocumented_things_are_seen():
    source = (
        "class A:\n    def f(self): return 1\n    def _g(self): return 1\ndef h(): return 1\nasync def i(): return 1"
    )
    assert list(undocumented(ast.parse(source))) == ["the module", "A", "A.f", "h", "i"]


# ---- Habits ----------------------------------------------------------------------------------------------------------


def bad_habits(tree: ast.AST) -> Iterator[str]:
    """Calls that run what a file or a hub repository says."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if called in ("yaml.load", "yaml.full_load", "yaml.unsafe_load"):
            yield f"{called}; use yaml.safe_load or a SafeLoader of ours"
        if called in ("pickle.load", "pickle.loads", "eval", "exec"):
            yield called
        if given.get("trust_remote_code") == "True":
            yield "trust_remote_code=True"


@pytest.mark.parametrize("file", python_files("trl_alpharl", "benchmarks"), ids=short)
def test_no_file_runs_what_it_reads(file):
    assert list(bad_habits(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "line, bad",
    [
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("torch.load(path, weights_only=True)", False),
        ("yaml.load(text, yaml.Loader)", True),
        ("yaml.safe_load(text)", False),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", True),
        ("eval(text)", True),
        ("model.eval()", False),
    ],
)
def test_bad_habits_are_seen(line, bad):
    assert bool(list(bad_habits(ast.parse(line)))) is bad
