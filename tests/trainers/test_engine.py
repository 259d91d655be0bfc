"""Training whose rollouts vLLM samples: what it samples from, what it leaves alone, resuming, every field."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch
from transformers import TrainerCallback

from trl_alpharl import PPOConfig, PPOTrainer
from trl_alpharl.knobs import PPOKnobs
from trl_alpharl.trainers.engine import engine_settings

pytestmark = pytest.mark.trl_compat
ON = {"use_vllm": True}
KINDS = {
    "full": {},
    "lora-shared": {"peft": True},
    "lora-adapter": {"peft": True, "critic": "adapter"},
    "value-model": {"peft": True, "value": True},
}


@pytest.fixture
def start(trainer, named_model, classifier, lora, fake_vllm, tmp_path):
    """A factory of fresh trainers with the fake engine."""

    def make(kind="full", **changes):
        kind = dict(KINDS[kind])
        own = {"peft_config": copy.deepcopy(lora)} if kind.pop("peft", False) else {}
        own |= {"value_model": copy.deepcopy(classifier)} if kind.pop("value", False) else {}
        return trainer(model=copy.deepcopy(named_model), **{**ON, **kind, **own, **changes})

    return make


@pytest.fixture
def arpo_on(arpo, named_model, fake_vllm):
    """A factory of ARPO trainers with the fake engine; `preset="ppo"` unless another is named."""

    def make(**changes):
        return arpo(**{"model": copy.deepcopy(named_model), "preset": "ppo", **ON, **changes})

    return make


def logged(run, key):
    return [entry[key] for entry in run.state.log_history if key in entry]


# What it samples from


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_samples_from_the_policy_of_the_moment(start, kind):
    """Its log-probs are those of the scoring pass in every rollout, at the run's temperature; the policy moves."""
    run = start(kind, total_episodes=32, learning_rate=3e-2, temperature=0.6)
    first = run.model.critic_parameters()[0].clone()
    run.train()
    ours, theirs = logged(run, "objective/entropy"), logged(run, "objective/engine_entropy")
    assert len(theirs) == 4 and theirs == pytest.approx(ours, rel=1e-4)
    assert abs(logged(run, "objective/kl")[-1]) > 1e-3  # the policy has left the weights on disk
    assert run.engine.generation.calls == ["sync", "generate"] * 4
    assert not torch.equal(first, run.model.critic_parameters()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_leaves_every_role_as_it_was(start, kind):
    run = start(kind)
    switch, policy = run.model.switch, run.model.adapters["policy"]
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    learning = {name: parameter.requires_grad for name, parameter in run.model.named_parameters()}
    flags = [(layer._active_adapter, layer._disable_adapters) for layer, _ in switch._layers]
    run.rollout()
    assert {name: parameter.requires_grad for name, parameter in run.model.named_parameters()} == learning
    assert [(layer._active_adapter, layer._disable_adapters) for layer, _ in switch._layers] == flags
    assert switch.current == policy and run.model.training
    after = run.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_ragged_answers_are_trained_on(start):
    """Some answers end early, by one of two stop tokens, and some do not end."""
    run = start(total_episodes=32, stop_token_id=7, temperature=3.0, missing_eos_penalty=1.0)
    run.train()
    assert 0 < max(logged(run, "completions/finished")) < 1
    assert min(logged(run, "completions/mean_length")) < 6
    rollout = run.rollout(0)
    last = rollout.completion_ids.gather(1, rollout.completion_mask.sum(1, keepdim=True) - 1)[:, 0]
    assert (torch.isin(last, torch.tensor([1, 7])) == rollout.finished).all()


def test_without_a_stop_token_answers_have_response_length(start):
    rollout = start(stop_token=None).rollout(0)
    assert rollout.completion_ids.shape == (8, 6) and rollout.completion_mask.all() and not rollout.finished.any()


def test_evaluation_and_sample_tables_do_without_the_engine(start, trainer, named_model, dataset, capsys):
    held_out = dataset.select(range(4))
    run = start(eval_dataset=held_out)
    plain = trainer(model=copy.deepcopy(named_model), eval_dataset=held_out)
    found, expected = run.evaluate(), plain.evaluate()
    for key in ("eval_objective/scores", "eval_objective/entropy"):
        assert found[key] == expected[key]
    assert "eval_objective/engine_entropy" not in found
    assert run.generate_completions() == plain.generate_completions()
    assert run.engine.generation.calls == []


# Draws


def test_a_resumed_run_becomes_the_straight_one(start, run_state, assert_same, tmp_path):
    sizes = {"num_mini_batches": 2, "save_strategy": "steps", "save_steps": 1, "total_episodes": 24}
    straight = start("lora-adapter", output_dir=str(tmp_path / "straight"), **sizes)
    straight.train()
    for step in (3, 4, 9):  # inside a rollout, at its end, inside the last
        resumed = start("lora-adapter", output_dir=str(tmp_path / f"from-{step}"), **{**sizes, "save_strategy": "no"})
        resumed.add_callback(DrawsFromGlobalRandomness())
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert_same(run_state(resumed), run_state(straight), f"resumed at {step}")


class DrawsFromGlobalRandomness(TrainerCallback):
    """What a user's callback may do between rollouts."""

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(3)


def test_processes_of_one_engine_draw_as_one_and_others_differ(start, monkeypatch):
    run = start()
    monkeypatch.setattr(run.args, "vllm_tensor_parallel_size", 2)
    seeds = []
    for process in range(4):
        monkeypatch.setattr(PPOConfig, "process_index", property(lambda self, process=process: process))
        monkeypatch.setattr(run.engine, "sample", lambda *args: (seeds.append(args[-1]), (None, -1.0))[1])
        run.draw_completions([[5]], [{}], index=0)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


# Fields

# field: (another value, the argument of VLLMGeneration, what else must be set)
SERVER = {"vllm_mode": "server"}
CHANGES = {
    "vllm_mode": ("server", "mode", {}),
    "vllm_gpu_memory_utilization": (0.5, "gpu_memory_utilization", {}),
    "vllm_max_model_length": (64, "max_model_length", {}),
    "vllm_tensor_parallel_size": (2, "tensor_parallel_size", {}),
    "vllm_enable_sleep_mode": (True, "enable_sleep_mode", {}),
    "vllm_server_host": ("rollouts", "server_host", SERVER),
    "vllm_server_port": (8001, "server_port", SERVER),
    "vllm_server_timeout": (9.0, "server_timeout", SERVER),
    "vllm_group_port": (51217, "group_port", SERVER),
}


def test_every_field_of_the_engine_is_in_the_table():
    assert set(CHANGES) == {knob.name for knob in fields(PPOKnobs) if knob.name.startswith("vllm_")}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_reaches_the_engine(start, monkeypatch, name):
    value, argument, others = CHANGES[name]
    monkeypatch.setattr(PPOConfig, "world_size", property(lambda self: 2))
    settings = engine_settings(PPOConfig(output_dir="unused", use_cpu=True, **ON, **others, **{name: value}))
    assert settings[argument] == value != engine_settings(PPOConfig(output_dir="unused", use_cpu=True))[argument]


def test_the_engine_is_started_with_the_runs_settings(start):
    run = start(vllm_gpu_memory_utilization=0.5, local_rollout_forward_batch_size=3, temperature=1, response_length=5)
    settings = run.engine.generation.settings
    assert settings["gpu_memory_utilization"] == 0.5 and settings["max_num_seqs"] == 3
    assert settings["temperature"] == 1.0 and settings["max_completion_length"] == 5
    assert settings["processing_class"] is run.processing_class and settings["accelerator"] is run.accelerator
    assert settings["generation_kwargs"] == {"stop_token_ids": [1], "ignore_eos": True}


def test_defaults_are_those_of_trls_grpo():
    from trl import GRPOConfig

    theirs = {field.name: field.default for field in fields(GRPOConfig)}
    for knob in fields(PPOKnobs):
        if knob.name.startswith(("vllm_", "use_vllm")):
            assert knob.default == theirs[knob.name], knob.name


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_nobody_reads_is_refused(config, name):
    value, _, others = CHANGES[name]
    with pytest.raises(ValueError, match=f"^{name} is .* use_vllm is false"):
        config(**{name: value})
    if name != "vllm_mode":
        with pytest.raises(ValueError, match=f"^{name} is set, but vllm_mode is"):
            config(**ON, **{name: value}, vllm_mode="colocate" if others else "server")


def test_a_group_of_processes_must_fit(config):
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size is 2, .* number of processes, 1"):
        config(**ON, vllm_tensor_parallel_size=2)


# Refusals


def test_without_vllm_the_trainer_says_so_before_it_loads_a_model(config, dataset):
    with pytest.raises(ImportError, match="use_vllm is set, but vLLM is not installed: pip install"):
        PPOTrainer(args=config(**ON), model="no/such-model", train_dataset=dataset, reward_funcs="exact_match")


def test_a_model_that_vllm_cannot_load_by_name_is_refused(trainer, fake_vllm):
    with pytest.raises(ValueError, match="use_vllm: model has no name"):
        trainer(**ON)
    assert fake_vllm.engines == []


@pytest.mark.parametrize("name", ["logit_noise", "epsilon_mix", "norm_noise"])
def test_exploration_is_refused(arpo_on, name):
    with pytest.raises(ValueError, match=f"^{name} is 0.1, but vLLM samples from the policy alone"):
        arpo_on(**{name: 0.1})


def test_exploration_of_a_preset_is_refused_by_its_name(arpo_on):
    with pytest.raises(ValueError, match=r"is .*, but vLLM samples from the policy alone"):
        arpo_on(preset="paper")


# ARPO


def test_arpo_without_mechanisms_is_ppo(arpo_on, start, run_state, assert_same):
    ours, plain = arpo_on(bf16=False), start()
    ours.train(), plain.train()
    assert_same(run_state(ours)["weights"], run_state(plain)["weights"])


def test_the_two_halves_of_a_screened_rollout_are_two_draws(arpo_on, dataset):
    """The same prompts are asked again, and answered anew."""
    run = arpo_on(screening=4, train_dataset=dataset.select(range(1)))
    rollout = run.rollout(0)
    assert run.engine.generation.calls == ["sync", "generate"] * 2
    answers = [tuple(row[mask].tolist()) for row, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    assert len(set(answers)) == len(answers) == 8
    assert rollout.behavior_logps is None


def test_replay_and_curriculum_train_with_the_engine(arpo_on):
    run = arpo_on(replay_ratio=0.25, curriculum="success", total_episodes=32)
    run.train()
    assert logged(run, "arpo/replayed")[-1] > 0
    assert logged(run, "objective/engine_entropy") == pytest.approx(logged(run, "objective/entropy"), rel=1e-4)
