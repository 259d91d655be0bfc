"""What continuous integration runs is what the README tells people to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"
STEPS = [shlex.split(line)[1:] for line in SCRIPT.read_text().splitlines() if line.startswith("run ")]


def test_the_script_can_run():
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    assert "\nset -euo pipefail\n" in SCRIPT.read_text()


def test_it_installs_and_tests_as_the_readme_says():
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (command,) = [block for block in blocks if "pytest" in block]
    told = [shlex.split(part) for part in command.split("&&")]
    done = [[word for word in step if word not in ("--clear", "--quiet")] for step in STEPS]
    assert [step for step in done if step in told] == told


def test_it_checks_style_types_and_the_oldest_trl():
    assert [".venv/bin/ruff", "check", "."] in STEPS and [".venv/bin/ruff", "format", "--check", "."] in STEPS
    assert [".venv/bin/mypy"] in STEPS
    assert [".venv-oldest/bin/pip", "install", "--quiet", "-c", "constraints-oldest.txt", "-e", ".[test]"] in STEPS
    assert STEPS[-1] == [".venv-oldest/bin/pytest", "-n", "2", "-m", "trl_compat"]
