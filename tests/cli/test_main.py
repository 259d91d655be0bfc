from __future__ import annotations

import subprocess
import sys

import pytest

from trl_alpharl import __version__
from trl_alpharl.cli.main import COMMANDS, main


def test_help_names_every_command(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert name in shown and command.HELP in shown


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trl-alpharl {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["trian"], "trian: unknown command; did you mean train?"),
        (["x"], "x: unknown command; expected one of train, recipes, rewards, metrics"),
        (["recipes", "all"], "recipes: found 'all', expected nothing after it"),
        (["train"], "train: found no recipe after 'train'; 'trl-alpharl recipes' lists the shipped ones"),
        (
            ["train", "--seed", "1"],
            "train: found no recipe after 'train'; 'trl-alpharl recipes' lists the shipped ones",
        ),
        (
            ["train", "quickstart/ppo_tiny", "--sed", "1"],
            "command line: sed: unknown field; did you mean seed?",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, line, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"trl-alpharl: {line}\n")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"train"}))
def test_each_command_has_help_and_runs(name, capsys):
    assert main([name, "--help"]) == 0
    assert COMMANDS[name].HELP in capsys.readouterr().out
    assert main([name]) == 0
    assert capsys.readouterr().out


def test_nothing_heavy_is_imported_before_training():
    """A fresh interpreter, since this one has everything loaded already. A checked recipe with a mistake counts too."""
    script = """
import sys
from trl_alpharl.cli.main import main
assert main(["train", "--help"]) == main(["train", "--help-all"]) == main(["metrics"]) == main(["recipes"]) == 0
assert main(["train", "quickstart/ppo_tiny", "--seed", "x"]) == 2
sys.exit(str({"torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines() == [
        "trl-alpharl: command line: seed: found 'x', expected a whole number",
        "set()",
    ]
