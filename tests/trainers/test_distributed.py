"""Runs under `accelerate launch` with the configs that this package ships (CASES 16, 17)."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_alpharl.trainers.checkpoints import check_manifest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _models, tokenizer, dataset):
    """A tiny model with its tokenizer and some prompts on disk, for scripts to load."""
    folder = tmp_path_factory.mktemp("launched")
    _models[0].save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.json").write_text(json.dumps(dataset["prompt"][:20]))
    return folder


def launch(config, script, folder):
    """Run a script by `accelerate launch` with one of the shipped configs, on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", ROOT / "configs/accelerate" / config, "--main_process_port", port]
    command += [SCRIPTS / script, folder]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def two(folder):
    """The folder after two processes ran scripts/two_processes.py."""
    launch("ddp.yaml", "two_processes.py", folder)
    return folder


@pytest.fixture(scope="module")
def script():
    """scripts/two_processes.py as a module, to do the same in this one process."""
    spec = importlib.util.spec_from_file_location("two_processes", SCRIPTS / "two_processes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(folder, name, rank):
    """Weights, logs and controllers of a run on one process."""
    return load_file(folder / f"{name}-{rank}.safetensors"), json.loads((folder / f"{name}-{rank}.json").read_text())


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("name", ["straight", "warm-up", "bad", "full", "powersgd", "projected"])
def test_both_processes_hold_the_same_weights_and_logs(two, name):
    (weights, facts), (others, other_facts) = outcome(two, name, 0), outcome(two, name, 1)
    assert_equal(weights, others)
    assert facts["controllers"] == other_facts["controllers"]
    assert [entry["step"] for entry in facts["logs"]] == [entry["step"] for entry in other_facts["logs"]]
    for entry, other in zip(facts["logs"], other_facts["logs"]):
        assert entry == other


def test_training_moves_adapter_and_critic(two, _models):
    weights, facts = outcome(two, "straight", 0)
    trained = [name for name, tensor in weights.items() if "lora_B" in name and tensor.any()]
    assert trained and weights["value_head.weight"].any()
    logs = [entry for entry in facts["logs"] if "episode" in entry]
    assert [entry["episode"] for entry in logs] == [8] * 4 + [16] * 4
    assert logs[0]["objective/kl"] == 0.0 and logs[0]["val/ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("step", [3, 4])  # inside a rollout, and between two
def test_resume_is_bit_equal_on_both(two, step):
    for rank in (0, 1):
        weights, facts = outcome(two, f"resumed-{step}", rank)
        expected, expected_facts = outcome(two, "straight", rank)
        assert_equal(weights, expected)
        assert facts == expected_facts


def test_the_checkpoint_is_whole_and_loads_plainly(two):
    checkpoint = two / "straight" / "checkpoint-3"
    manifest = check_manifest(checkpoint)
    for rank in (0, 1):
        own = {f"controllers_{rank}.json", f"rollout_{rank}.safetensors", f"rng_state_{rank}.pth"}
        assert own <= manifest["files"].keys()
    base = AutoModelForCausalLM.from_pretrained(two / "model")
    assert PeftModel.from_pretrained(base, checkpoint)(torch.tensor([[5, 6]])).logits.isfinite().all()
    critic = AutoModelForSequenceClassification.from_pretrained(two / "model", num_labels=1)
    critic = PeftModel.from_pretrained(critic, checkpoint / "critic")
    assert critic(torch.tensor([[5, 6]])).logits.any()


def test_one_process_does_not_resume_what_two_saved(two, script):
    run = script.make(two, "alone", processes=1, num_mini_batches=2)
    with pytest.raises(ValueError, match="world_size=2; this run has 1"):
        run.train(resume_from_checkpoint=str(two / "straight" / "checkpoint-3"))


def test_one_row_is_evaluated_though_a_process_has_none(two):
    for rank in (0, 1):
        evaluated = [entry for entry in outcome(two, "straight", rank)[1]["logs"] if "eval_objective/scores" in entry]
        assert [entry["step"] for entry in evaluated] == [4, 8]
        table = json.loads((two / f"table-{rank}.json").read_text())
        assert [row["query"] for row in table] == json.loads((two / "prompts.json").read_text())[:1]


@pytest.mark.parametrize("silent_rows", [0, 4])  # 4: one process has no valid token in the mini-batch
def test_gradients_equal_those_of_one_process(two, script, silent_rows):
    expected = script.gradients(two, silent_rows, processes=1)
    assert expected["policy.lm_head.weight"].abs().max() > 1e-3
    for rank in (0, 1):
        gradients = load_file(two / f"gradients-{silent_rows}-{rank}.safetensors")
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-6), name


def test_a_bad_reward_on_one_process_skips_the_rollout_on_both(two):
    logs = [entry for entry in outcome(two, "bad", 0)[1]["logs"] if "val/skipped_steps" in entry]
    assert [entry["grad_norm"] == 0 for entry in logs] == [True, True, False, False]
    assert [entry["val/skipped_steps"] for entry in logs] == [1, 2, 2, 2]


def test_low_rank_gradients_move_the_weights_and_send_fewer_bytes(two, _models):
    """With every exchange; over full gradients and projected ones also when a rollout was skipped on one process."""
    sent = {}
    for name in ("full", "powersgd", "projected"):
        weights, facts = outcome(two, name, 0)
        logs = [entry for entry in facts["logs"] if "lowrank/sent_bytes" in entry]
        sent[name] = logs[-1]["lowrank/sent_bytes"]
        before = _models[0].model.layers[0].mlp.up_proj.weight
        assert len(logs) >= 8 and logs[-1]["grad_norm"] > 0 and logs[-1]["lowrank/skipped_steps"] == 0
        assert not torch.equal(weights["policy.model.layers.0.mlp.up_proj.weight"], before)
    learning = [tensor for key, tensor in weights.items() if not key.startswith("reference.")]
    assert sent["full"] == 4 * sum(tensor.numel() for tensor in learning)
    assert max(sent["powersgd"], sent["projected"]) < sent["full"] / 3


def test_nf4_and_lora_under_accelerate_launch_with_one_process(folder):
    launch("single.yaml", "nf4_lora.py", folder)
    result = json.loads((folder / "nf4.json").read_text())
    assert result["steps"] == 3
    matrices = [name for name in result["packed"] if name.endswith("base_layer.weight")]
    assert len(matrices) == 14  # seven in each of two layers
    assert not set(result["changed"]) & set(result["packed"])
    for kind in ("lora_A.default", "lora_B.default", "lora_B.critic", "value_head"):
        assert any(kind in name for name in result["changed"]), kind
    assert all("lora" in name or "value_head" in name for name in result["changed"])
