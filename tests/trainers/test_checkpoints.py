"""Checkpoints are whole or absent, load plainly, and what is damaged is refused by name."""

from __future__ import annotations

import copy
import inspect
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    modeling_utils,
)

from trl_alpharl.roles import saving
from trl_alpharl.trainers import checkpoints
from trl_alpharl.trainers.checkpoints import check_manifest
from trl_alpharl.trainers.metrics import MetricSums

pytestmark = pytest.mark.trl_compat
SAVES = {"save_strategy": "steps", "save_steps": 1, "total_episodes": 8}  # two optimizer steps


@pytest.fixture
def saved(trainer):
    """A trainer after two optimizer steps and the folder of its last checkpoint, in the middle of a rollout."""
    run = trainer(**SAVES, num_mini_batches=2, max_steps=3)
    run.train()
    return run, Path(run.args.output_dir) / "checkpoint-3"


def checkpoint_names(run):
    return sorted(path.name for path in Path(run.args.output_dir).glob("checkpoint-*"))


# Whole or absent

WRITES = (
    (saving, "save_file"),
    (checkpoints, "save_file"),
    (torch, "save"),
    (modeling_utils, "safe_save_file"),
    (shutil, "copy"),
    (Path, "write_text"),
    (os, "replace"),
)


def break_write(monkeypatch, number):
    """Let the `number`-th write fail, as on a full disk. Returns what was written before it."""
    written = []

    def breaking(name, function):
        def write(*args, **kwargs):
            if len(written) == number:
                raise OSError(f"no space left for {name}")
            written.append(name)
            return function(*args, **kwargs)

        return write

    for owner, name in WRITES:
        monkeypatch.setattr(owner, name, breaking(name, getattr(owner, name)))
    return written


def test_a_write_that_fails_leaves_no_checkpoint(saved, monkeypatch):
    run, last = saved
    before = {path: path.read_bytes() for path in last.rglob("*") if path.is_file()}
    run.state.global_step = 4
    number = 0
    while True:
        with monkeypatch.context() as patch:
            written = break_write(patch, number)
            try:
                run._save_checkpoint(run.model, None)
                break
            except OSError as error:
                assert "no space left" in str(error)
        assert checkpoint_names(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        assert not (last.parent / ".saving").exists()
        number += 1
    assert {name for _, name in WRITES} <= set(written)  # every kind of write was made to fail
    check_manifest(last.parent / "checkpoint-4")
    assert before == {path: path.read_bytes() for path in last.rglob("*") if path.is_file()}


def test_saving_a_step_again_replaces_it_in_one_move(saved, monkeypatch):
    """A run that starts over in the same folder."""
    run, last = saved
    (last / "left from an earlier run").touch()
    (last / "critic" / "value_head.safetensors").write_bytes(b"old")
    run._save_checkpoint(run.model, None)
    check_manifest(last)
    assert not (last / "left from an earlier run").exists()

    real, moves = os.replace, []

    def second_move_fails(source, target):
        moves.append(target)
        if len(moves) == 2:
            raise OSError("killed")
        return real(source, target)

    monkeypatch.setattr(os, "replace", second_move_fails)
    with pytest.raises(OSError, match="killed"):
        run._save_checkpoint(run.model, None)
    assert checkpoint_names(run) == ["checkpoint-1", "checkpoint-2"]  # absent, not half old and half new


def test_resume_after_a_kill_takes_the_last_whole_checkpoint_and_tidies_up(saved, trainer, model):
    run, last = saved
    leftover = last.parent / ".saving" / "checkpoint-4"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half a fi")
    resumed = trainer(**SAVES, num_mini_batches=2, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[: len(run.state.log_history) - 1] == run.state.log_history[:-1]  # 3 steps, kept
    assert checkpoint_names(resumed)[-1] == "checkpoint-4"
    assert not (last.parent / ".saving").exists()


# Damage

NAMES = [
    "adapter_model.safetensors",
    "critic/adapter_model.safetensors",
    "critic/value_head.safetensors",
    "optimizer.pt",
    "controllers.json",
    "rollout.safetensors",
    "trainer_state.json",
]


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_by_the_file_s_name(saved, lora, trainer, tmp_path, name):
    run = trainer(**SAVES, max_steps=1, peft_config=lora, output_dir=str(tmp_path / "lora"))
    run.train()
    path = tmp_path / "lora" / "checkpoint-1" / name
    whole = path.read_bytes()
    for damage, message in (
        (whole[: len(whole) // 2], f"{name} should have {len(whole)} bytes, found {len(whole) // 2}"),
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], f"{name} is not what was saved"),
        (None, f"{name} is missing"),
    ):
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(ValueError, match=message):
            run.train(resume_from_checkpoint=str(tmp_path / "lora" / "checkpoint-1"))


def test_a_folder_of_another_trainer_is_refused(saved):
    run, last = saved
    (last / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
        run.train(resume_from_checkpoint=True)
    (last / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"is no checkpoint of this trainer: manifest\.json is missing"):
        run.train(resume_from_checkpoint=True)


# What transformers' options ask for


def test_save_total_limit(trainer):
    run = trainer(**{**SAVES, "total_episodes": 16}, save_total_limit=2)
    run.train()
    assert checkpoint_names(run) == ["checkpoint-3", "checkpoint-4"]


def test_save_only_model_cannot_resume(trainer, model):
    run = trainer(**SAVES, save_only_model=True)
    run.train()
    last = Path(run.args.output_dir) / "checkpoint-2"
    assert (last / "README.md").is_file() and (last / "critic" / "model.safetensors").is_file()
    for pattern in checkpoints.RUN_STATE:
        assert pattern in ("manifest.json", "trainer_state.json") or not list(last.glob(pattern))
    assert_equal_weights(AutoModelForCausalLM.from_pretrained(last), model)
    with pytest.raises(ValueError, match="was saved with save_only_model"):
        trainer(**SAVES).train(resume_from_checkpoint=str(last))


def test_save_strategy_epoch(trainer, dataset):
    run = trainer(
        train_dataset=dataset.select(range(16)), total_episodes=32, save_strategy="epoch"
    )  # an epoch is 2 rollouts of 2 steps
    run.train()
    assert checkpoint_names(run) == ["checkpoint-4", "checkpoint-8"]


def peak_at_step_two(prompts, completions, trainer_state, **kwargs):
    return [5.0 if trainer_state.global_step == 2 else 1.0 for _ in completions]


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, ["checkpoint-2"]),
        ({"save_strategy": "best"}, ["checkpoint-1", "checkpoint-2"]),
    ],
)
def test_the_best_model_is_loaded_at_the_end(trainer, dataset, lora, strategy, kept):
    run = trainer(
        **strategy,
        total_episodes=16,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=dataset.select(range(2)),
        load_best_model_at_end=True,
        metric_for_best_model="objective/scores",
        greater_is_better=True,
        peft_config=lora,
        critic="adapter",
        reward_funcs=peak_at_step_two,
    )
    seen = {}

    class Remember(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen[state.global_step] = copy.deepcopy(run.model.state_dict())

    run.add_callback(Remember())
    run.train()
    assert run.state.best_metric == 5.0
    assert Path(run.state.best_model_checkpoint) == Path(run.args.output_dir) / "checkpoint-2"
    state = json.loads((Path(run.args.output_dir) / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == run.state.best_model_checkpoint
    assert checkpoint_names(run) == kept
    now = run.model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in seen[2].items())
    moved = [name for name, tensor in seen[4].items() if not torch.equal(now[name], tensor)]
    assert any("value_head" in name for name in moved) and any(".critic." in name for name in moved)

    (Path(run.state.best_model_checkpoint) / "critic" / "value_head.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="value_head"):
        run._load_best_model()


# Plain formats


def assert_equal_weights(loaded, trained):
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_save_model_writes_a_plain_model_folder(trainer, model, tmp_path):
    run = trainer(total_episodes=8)
    run.train()
    run.save_model(str(tmp_path / "out"))
    assert_equal_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w6")["input_ids"] == [5, 6]
    arguments = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert (arguments["gradient_accumulation_steps"], arguments["kl_coef"]) == (4, 0.05)  # as the user wrote them
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_save_model_writes_a_plain_adapter_folder(trainer, model, lora, tmp_path):
    base = copy.deepcopy(model)
    base.save_pretrained(tmp_path / "base")
    model.name_or_path = model.config._name_or_path = str(tmp_path / "base")
    run = trainer(total_episodes=8, peft_config=lora, critic="adapter")
    run.train()
    run.save_model(str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir() if "adapter" in path.name} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    ids = torch.tensor([[5, 6, 7]])
    expected = run.policy_model(ids).logits
    assert torch.equal(PeftModel.from_pretrained(base, tmp_path / "out")(ids).logits, expected)
    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, expected)


def values_by_the_trainer(run, prompts):
    """The critic's value after each prompt: what it says before the first completion token."""
    examples = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
    return run._score_examples(examples, 0, MetricSums()).values[:, 0]


@pytest.mark.parametrize("kind", ["full", "lora-shared", "lora-adapter", "value-model"])
def test_the_critic_in_a_checkpoint_is_a_plain_classifier(trainer, model, classifier, lora, tmp_path, kind):
    """CASES 15."""
    base = copy.deepcopy(model)
    kinds = {
        "full": {},
        "lora-shared": {"peft_config": lora},
        "lora-adapter": {"peft_config": lora, "critic": "adapter"},
        "value-model": {"value_model": classifier},
    }
    run = trainer(**SAVES, **kinds[kind])
    run.train()
    folder = Path(run.args.output_dir) / "checkpoint-2" / "critic"
    if kind.startswith("lora"):
        base.save_pretrained(tmp_path / "base")
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        loaded = PeftModel.from_pretrained(loaded, folder)
    else:
        loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    prompts = [[5, 6, 7], [40, 2, 9, 33], [8, 21]]
    expected = values_by_the_trainer(run, prompts)
    assert expected.unique().numel() == 3
    for prompt, value in zip(prompts, expected):
        assert loaded(torch.tensor([prompt])).logits.item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7)


def test_everything_is_read_without_unpickling_objects(saved, trainer, model, monkeypatch):
    _, last = saved
    real, calls = torch.load, []

    def load(*args, **kwargs):
        calls.append(inspect.signature(real).bind(*args, **kwargs).arguments.get("weights_only"))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    trainer(**SAVES, num_mini_batches=2, max_steps=4).train(resume_from_checkpoint=str(last))
    assert len(calls) >= 3 and set(calls) == {True}  # optimizer, schedule, random state


def test_the_model_card_names_the_method(saved):
    _, last = saved
    for folder in (last, last.parent):
        card = (folder / "README.md").read_text()
        assert "ppo" in card and "trl-alpharl" in card
