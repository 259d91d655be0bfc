"""What an installation holds, and that the files which say so agree."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from trl_alpharl import _trl

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def requirements() -> list[Requirement]:
    extras = (line for lines in PROJECT["optional-dependencies"].values() for line in lines)
    return [Requirement(line) for line in [*PROJECT["dependencies"], *extras]]


def test_every_package_is_listed():
    """The list is explicit because a search would leave the YAML files out of the wheel without a word."""
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "trl_alpharl").rglob("__init__.py")}
    expected = {".".join(folder.parts) for folder in folders} | {"trl_alpharl.recipes", "trl_alpharl.configs"}
    assert set(setup_cfg()["options"]["packages"].split()) == expected
    for name in ("recipes", "configs"):
        assert (ROOT / name / "__init__.py").is_file()
        assert f"trl_alpharl.{name} = {name}" in setup_cfg()["options"]["package_dir"]


@pytest.mark.slow
def test_a_wheel_holds_every_module_recipe_config_and_data_file(tmp_path):
    source = tmp_path / "source"  # a copy: what an earlier build left in the checkout would end up in the wheel
    for folder in ("trl_alpharl", "recipes", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    expected = {file.relative_to(ROOT).as_posix() for file in (ROOT / "trl_alpharl").rglob("*.py")}
    for folder in ("recipes", "configs"):
        files = [*(ROOT / folder).rglob("*.yaml"), *(ROOT / folder).rglob("*.jsonl"), ROOT / folder / "__init__.py"]
        assert len(files) > 2
        expected |= {f"trl_alpharl/{file.relative_to(ROOT).as_posix()}" for file in files}
    assert expected <= held
    assert not [name for name in held if name.startswith(("tests/", "recipes/", "configs/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_two_sets_of_constraints_differ_by_trl_alone():
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    assert newest.keys() == oldest.keys()
    assert {name for name in newest if newest[name] != oldest[name]} == {"trl"}
    assert f"{oldest['trl']} to {newest['trl']}" == _trl.TESTED


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_every_requirement_is_pinned_to_a_version_that_it_admits(name):
    found = {key.lower().replace("_", "-"): version for key, version in pins(name).items()}
    unpinned = {r.name for r in requirements() if r.name.lower() not in found}
    assert unpinned <= {"trackio"}  # a tracker's version is the user's choice
    for requirement in requirements():
        version = found.get(requirement.name.lower())
        assert version is None or requirement.specifier.contains(version, prereleases=True), requirement


def test_lower_bounds_are_the_tested_versions():
    """A bound below what was ever run would be a promise; TRL alone has an older tested version."""
    found = {key.lower(): Version(version) for key, version in pins("constraints-oldest.txt").items()}
    for requirement in requirements():
        for bound in requirement.specifier:
            tested = found[requirement.name.lower()].release
            given = Version(bound.version).release
            assert bound.operator == ">=" and given == tested[: len(given)], str(requirement)


def test_no_upper_pin_and_one_python():
    assert not re.search(r"<|~=|==", " ".join(str(requirement.specifier) for requirement in requirements()))
    assert PROJECT["requires-python"] == ">=3.11"


def test_every_dependency_is_imported():
    """What nobody imports need not be installed; bitsandbytes is what transformers loads for 4-bit weights."""
    modules = {"pyyaml": "yaml"}
    source = "\n".join(file.read_text() for file in (ROOT / "trl_alpharl").rglob("*.py"))
    for name in {Requirement(line).name for line in PROJECT["dependencies"]} - {"bitsandbytes"}:
        module = modules.get(name, name)
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE), name
