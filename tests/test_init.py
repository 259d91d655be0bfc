from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trl_alpharl


def test_public_names_resolve():
    for name in trl_alpharl.__all__:
        assert getattr(trl_alpharl, name) is not None
    assert dir(trl_alpharl) == sorted(trl_alpharl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'PPO'"):
        _ = trl_alpharl.PPO


def test_the_version_is_the_package_s():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert trl_alpharl.__version__ == project["version"]


def test_import_is_light():
    """A fresh interpreter, since this one has everything loaded already."""
    light = "import sys, trl_alpharl; sys.exit(str({'torch', 'transformers', 'yaml'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"
