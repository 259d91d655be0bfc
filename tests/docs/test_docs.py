"""Every command in the README and docs/ is run or parsed; every code block runs or compiles; links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from pathlib import Path

import pytest

from trl_alpharl.cli.main import main
from trl_alpharl.metrics_table import METRICS
from trl_alpharl.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    lines = [
        (page.name, line.strip())
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    return [(name, part.strip()) for name, line in lines for part in line.split("&&")]


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands(page, command):
    words = shlex.split(command)
    program = words[0].removeprefix(".venv/bin/")
    if program == "accelerate":
        config = words[words.index("--config_file") + 1]
        assert (ROOT / config).is_file()
        assert words[words.index("-m") + 1] == "trl_alpharl.cli.train"
        words = ["trl-alpharl", "train", *words[words.index("-m") + 2 :]]
        program = "trl-alpharl"
    if program == "trl-alpharl" and words[1] == "train" and not {"--help", "--help-all"} & set(words):
        load_recipe(words[2], words[3:])
    elif program == "trl-alpharl":
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(words[1:]) == 0
        assert shown.getvalue()
    elif program in ("python", "python3.11", "bash"):
        assert words[1] == "-m" or (ROOT / words[1]).is_file(), command
    elif program == "pip":
        for flag, name in itertools.pairwise(words):
            if flag == "-c":
                assert (ROOT / name).is_file()
    else:
        assert program in ("pytest", "ruff", "mypy", "trackio"), f"{page}: nobody checks {command!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


def test_the_readme_code_runs(model, tokenizer, tmp_path, monkeypatch):
    """The class swap and the own loop, with a tiny model in place of the named one."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    names: dict = {}
    for block in blocks(ROOT / "README.md", "python"):
        block = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "tiny")
        block = block.replace("total_episodes=512", "total_episodes=8, use_cpu=True, disable_tqdm=True")
        exec(compile(block, "README.md", "exec"), names)
    assert names["metrics"]["objective/scores"] <= 0
    assert names["trainer"].state.global_step > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_metrics_page_is_the_table():
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \|$", page, flags=re.MULTILINE)
    assert rows == [(name, metric.meaning, metric.unit or "-") for name, metric in METRICS.items()]


def test_the_two_commands_stand_alone():
    first, second = blocks(ROOT / "README.md", "bash")[:2]
    for command in (first, second):
        assert command.startswith("python3.11 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")
    assert first.strip().endswith("&& .venv/bin/trl-alpharl train recipes/quickstart/arpo_tiny.yaml")
    assert ".venv/bin/pytest" in second
