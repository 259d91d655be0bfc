"""ARPO in two processes: one set of statistics, one policy, each process its own replay buffer; exact on resume."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts/two_processes_arpo.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _models, tokenizer, dataset):
    """The folder after two processes ran the script."""
    folder = tmp_path_factory.mktemp("launched")
    _models[0].save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.json").write_text(json.dumps(dataset["prompt"][:20]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "configs/accelerate/ddp.yaml",
    ]
    command += ["--main_process_port", port, SCRIPT, folder]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def tensors(folder, name):
    return load_file(folder / f"{name}.safetensors")


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.nan_to_num(9), second[name].nan_to_num(9)), name


def test_processes_agree_on_everything_but_the_replay_buffer(folder):
    assert_equal(tensors(folder, "straight-0"), tensors(folder, "straight-1"))
    assert_equal(tensors(folder, "straight-curriculum-0"), tensors(folder, "straight-curriculum-1"))
    assert json.loads((folder / "straight-0.json").read_text()) == json.loads((folder / "straight-1.json").read_text())
    buffers = [tensors(folder, f"straight-replay-{rank}") for rank in (0, 1)]
    assert len(buffers[0]["born"]) == len(buffers[1]["born"]) == 16  # 4 rollouts of 4 completions a process
    assert not torch.equal(buffers[0]["completion_ids"], buffers[1]["completion_ids"])
    assert tensors(folder, "straight-curriculum-0")["tries"].sum() == 32


@pytest.mark.parametrize("part", ["0", "1", "replay-0", "replay-1", "curriculum-0", "curriculum-1"])
def test_a_resumed_run_is_the_straight_run(folder, part):
    assert_equal(tensors(folder, f"resumed-{part}"), tensors(folder, f"straight-{part}"))


@pytest.mark.parametrize("rank", [0, 1])
def test_its_controllers_too(folder, rank):
    assert json.loads((folder / f"resumed-{rank}.json").read_text()) == json.loads(
        (folder / f"straight-{rank}.json").read_text()
    )
