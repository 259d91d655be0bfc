"""PPOConfig: TRL 1.12's fields, sizes that are computed, one line for every bad value, two parsers."""

import copy
import json
import pickle
import shlex
from dataclasses import fields, replace

import pytest
import torch
from transformers import HfArgumentParser

from trl_alpharl import PPOConfig
from trl_alpharl._trl import BaseConfig, TrlParser
from trl_alpharl.knobs import PPOKnobs
from trl_alpharl.trainers.ppo_config import COMPUTED, OTHER_NAMES

pytestmark = pytest.mark.trl_compat

# Every field of TRL 1.12's PPOConfig that TrainingArguments does not have, with its default.
FIELDS_1_12 = {
    "dataset_num_proc": None,
    "num_mini_batches": 1,
    "total_episodes": None,
    "local_rollout_forward_batch_size": 64,
    "num_sample_generations": 10,
    "response_length": 53,
    "stop_token": None,
    "stop_token_id": None,
    "temperature": 0.7,
    "missing_eos_penalty": None,
    "sft_model_path": "EleutherAI/pythia-160m",
    "num_total_batches": None,
    "micro_batch_size": None,
    "local_batch_size": None,
    "batch_size": None,
    "local_mini_batch_size": None,
    "mini_batch_size": None,
    "reward_model_path": "EleutherAI/pythia-160m",
    "model_adapter_name": None,
    "ref_adapter_name": None,
    "num_ppo_epochs": 4,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
    "ds3_gather_for_generation": True,
    "world_size": None,
}
OTHER_DEFAULTS = {"stop_token": "eos", "sft_model_path": None, "reward_model_path": None}


def make(**changes):
    return PPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **changes})


# ---- TRL 1.12's fields -----------------------------------------------------------------------------------------------


def test_the_table_is_what_trl_1_12_has():
    ppo = pytest.importorskip("trl.experimental.ppo", exc_type=ImportError)
    base = {field.name for field in fields(BaseConfig)}
    assert {f.name: f.default for f in fields(ppo.PPOConfig) if f.name not in base} == FIELDS_1_12


@pytest.mark.parametrize("name", sorted(set(FIELDS_1_12) - set(COMPUTED)))
def test_every_field_of_1_12_is_here_with_its_default(name):
    own = {field.name: field.default for field in fields(PPOConfig)}
    assert own[name] == OTHER_DEFAULTS.get(name, FIELDS_1_12[name])


def test_inherited_defaults():
    config = make()
    assert config.learning_rate == 3e-6
    assert config.gradient_checkpointing is config.activation_checkpointing is False
    assert config.push_to_hub is False
    assert config.bf16 is False  # a CPU; a GPU that can decides otherwise


def test_no_field_is_without_help():
    for field in fields(PPOKnobs):
        assert field.metadata["help"].endswith(("]", ".")), field.name


@pytest.mark.parametrize("fp16, expected", [(True, False), (False, True)])
def test_bf16_follows_the_hardware_unless_it_is_said(monkeypatch, fp16, expected):
    monkeypatch.setattr("trl_alpharl.trainers.ppo_config.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(BaseConfig, "__post_init__", lambda self: None)  # would look for the GPU
    machine = {"world_size": 1, "n_gpu": 1, "device": torch.device("cuda")}
    on_gpu = type("OnGpu", (PPOConfig,), {name: property(lambda self, it=it: it) for name, it in machine.items()})
    assert on_gpu("unused", fp16=fp16).bf16 is expected
    assert on_gpu("unused", bf16=False).bf16 is False
    assert on_gpu("unused", use_cpu=True).bf16 is False


# ---- Computed sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_sizes_are_1_12s(monkeypatch, world):
    monkeypatch.setattr(PPOConfig, "world_size", property(lambda self: world))
    config = make(per_device_train_batch_size=4, gradient_accumulation_steps=6, num_mini_batches=3, total_episodes=100)
    assert config.local_batch_size == 24
    assert config.batch_size == 24 * world
    assert config.micro_batch_size == 4 * world
    assert config.local_mini_batch_size == 8
    assert config.mini_batch_size == 8 * world
    assert config.num_total_batches == {1: 5, 2: 3}[world]  # 100 / 24 and 100 / 48, rounded up
    assert config.steps_per_rollout == 12


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_size_can_be_read_and_not_set(name):
    with pytest.raises(TypeError, match=f"^{name} is computed from the other sizes and cannot be set"):
        make(**{name: 2})
    config = make()
    with pytest.raises(AttributeError):
        setattr(config, name, 2)
    assert getattr(config, name) in (None, 1, 8)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_size_on_a_command_line_or_in_a_file_is_an_error_that_names_it(parser, name, tmp_path):
    with pytest.raises(ValueError, match=f"--{name}"):
        parser(PPOConfig).parse_args_into_dataclasses(["--output_dir", "unused", f"--{name}", "2"])
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: unused\n{name}: 2\n")
    with pytest.raises(ValueError, match=name):
        parser(PPOConfig).parse_yaml_file(str(path))
    if parser is TrlParser:
        with pytest.raises(ValueError, match=f"--{name}"):
            parser(PPOConfig).parse_args_and_config(["--config", str(path)])


@pytest.mark.parametrize("name, ours", OTHER_NAMES.items())
def test_other_trainers_names_are_answered_with_ours(name, ours):
    assert ours in {field.name for field in fields(PPOConfig)}
    with pytest.raises(TypeError, match=f"no field '{name}'; here it is called '{ours}'"):
        make(**{name: 1})


# ---- One line for a bad value ----------------------------------------------------------------------------------------

COUNTS = [
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_ppo_epochs", "num_mini_batches"),
    *("total_episodes", "response_length", "local_rollout_forward_batch_size", "kl_horizon"),
]
WHOLE = ["critic_warmup_steps", "num_sample_generations", "stop_token_id"]
POSITIVE = ["temperature", "cliprange", "cliprange_high", "cliprange_value", "missing_eos_penalty", "kl_target"]
NOT_NEGATIVE = ["kl_coef", "vf_coef", "critic_learning_rate"]
SHARES = ["gamma", "lam", "lam_critic"]
PORTS = ["vllm_server_port", "vllm_group_port"]
BAD_VALUES = [
    *((name, bad, "a whole number, at least 1") for name in COUNTS for bad in (0, -1, 1.5, True, "4")),
    *((name, bad, "a whole number, 0 or more") for name in WHOLE for bad in (-1, 0.5, True)),
    *((name, bad, "above 0") for name in POSITIVE for bad in (0, -0.1, float("nan"), float("inf"), "1")),
    *((name, bad, "0 or more") for name in NOT_NEGATIVE for bad in (-1e-9, float("nan"))),
    *((name, bad, "a port, 1 to 65535") for name in PORTS for bad in (0, 65536, "8000")),
    *(("vllm_gpu_memory_utilization", bad, "above 0 and at most 1") for bad in (0, 1.1, "0.3")),
    *(("vllm_server_timeout", bad, "above 0") for bad in (0, -1.0)),
    *((name, bad, "at least 1") for name in ("vllm_max_model_length", "vllm_tensor_parallel_size") for bad in (0, 1.5)),
    ("vllm_mode", "colocated", "one of 'colocate', 'server'"),
    *((name, bad, "between 0 and 1") for name in SHARES for bad in (-0.01, 1.01, float("nan"))),
    *((name, None, "") for name in ("num_ppo_epochs", "temperature", "kl_coef", "gamma", "kl_estimator", "critic")),
    ("stop_token", "</s>", "one of 'eos', None"),
    ("kl_estimator", "k4", "one of 'k1', 'k2', 'k3'"),
    ("critic", "own", "one of 'shared', 'adapter'"),
    ("max_steps", 0, "at least 1, or -1"),
    *(("reward_weights", bad, "a list of finite numbers") for bad in ([1.0, float("nan")], [True], ["1"], 1.0)),
]


@pytest.mark.parametrize("name, bad, rule", BAD_VALUES)
def test_a_bad_value_is_one_line_that_names_the_field(name, bad, rule):
    with pytest.raises(ValueError) as error:
        make(**{name: bad})
    message = str(error.value)
    assert message.startswith(f"{name} is {bad!r}; it must be ") and rule in message and "\n" not in message


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name in SHARES for value in (0, 1)),
        {"kl_coef": 0, "vf_coef": 0},
        {"critic_warmup_steps": 0, "num_sample_generations": 0, "stop_token_id": 0},
        {"stop_token": None, "kl_estimator": "k2", "critic": "adapter"},
        {"temperature": 2, "cliprange_high": 0.28, "missing_eos_penalty": 1.0},
        {"max_steps": -1, "reward_weights": [1, -0.5]},
    ],
)
def test_values_at_the_edge_are_taken(values):
    config = make(**values)
    assert {name: getattr(config, name) for name in values} == values


BAD_TOGETHER = [
    (
        {"num_mini_batches": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        r"num_mini_batches is 3, .* rollout of 4 completions .*per_device_train_batch_size x gradient_accumulation",
    ),
    ({"kl_target": 6.0, "kl_coef": 0.0}, "kl_coef is 0, which kl_target cannot steer"),
    (
        {"kl_target": 6.0, "kl_horizon": 8, "per_device_train_batch_size": 40},
        "kl_horizon is 8; .* a fifth of the rollout's 40",
    ),
    (
        {"compile_layers": True, "gradient_checkpointing": True},
        "compile_layers and gradient_checkpointing are both on",
    ),
    ({"auto_find_batch_size": True}, "not supported: auto_find_batch_size"),
    ({"use_liger_kernel": True}, "not supported: use_liger_kernel"),
    ({"label_smoothing_factor": 0.1}, "not supported: label_smoothing_factor"),
    ({"neftune_noise_alpha": 5.0}, "not supported: neftune_noise_alpha"),
    ({"train_sampling_strategy": "group_by_length"}, "not supported: train_sampling_strategy='group_by_length'"),
    ({"fp16": True, "use_cpu": True}, "not supported: fp16 on a CPU"),
    (
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "not supported: gradient_checkpointing_kwargs.use_reentrant: true",
    ),
]


@pytest.mark.parametrize("values, message", BAD_TOGETHER)
def test_what_cannot_work_together_or_at_all_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        make(**values)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("deepspeed", {"zero_optimization": {"stage": 3}}, "not supported: deepspeed"),
        ("fsdp", ["full_shard"], "not supported: fsdp"),
        ("parallelism_config", object(), "not supported: parallelism_config"),
        ("n_gpu", 2, "not supported: several GPUs in one process .*accelerate launch"),
    ],
)
def test_other_ways_to_spread_the_work_are_refused(monkeypatch, name, value, message):
    def pretend(self):  # the real one would look for what is not installed here
        self.__dict__[name] = value

    monkeypatch.setattr(BaseConfig, "__post_init__", pretend)
    monkeypatch.setattr(PPOConfig, "world_size", property(lambda self: 1))
    if name == "n_gpu":
        monkeypatch.setattr(PPOConfig, "n_gpu", property(lambda self: value))
    else:
        monkeypatch.setattr(PPOConfig, "n_gpu", property(lambda self: 1))
    with pytest.raises(ValueError, match=message):
        make()


# ---- The trainer's copy ----------------------------------------------------------------------------------------------


def test_for_trainer_leaves_the_users_config_alone():
    config = make(gradient_accumulation_steps=4, num_mini_batches=2)
    before, shown = dict(vars(config)), config.to_json_string()
    args = config.for_trainer(100)
    assert vars(config) == before and config.to_json_string() == shown
    assert (args.gradient_accumulation_steps, args.remove_unused_columns, args.ignore_data_skip) == (1, False, True)
    for name in COMPUTED:
        if name != "num_total_batches":  # known only now
            assert getattr(args, name) == getattr(config, name)


def test_training_leaves_the_users_config_alone(trainer, config, dataset):
    args = config(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=2)
    before, shown = dict(vars(args)), args.to_json_string()
    run = trainer(args=args, eval_dataset=dataset.select(range(4)))
    run.train()
    assert vars(args) == before and args.to_json_string() == shown


@pytest.mark.parametrize(
    "values, rollouts, steps",
    [
        ({"total_episodes": 16}, 2, 2 * 2 * 2),
        ({"total_episodes": 17}, 3, 3 * 2 * 2),
        ({"num_train_epochs": 1}, 7, 7 * 2 * 2),  # 50 prompts in rollouts of 8
        ({"num_train_epochs": 0.5}, 4, 4 * 2 * 2),
        ({"max_steps": 1}, 1, 1),
        ({"max_steps": 9}, 3, 9),  # stops inside the third rollout
        ({"max_steps": 4, "total_episodes": 800}, 1, 4),  # max_steps wins
    ],
)
def test_episodes_and_steps(values, rollouts, steps):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    args = make(**sizes, num_mini_batches=2, num_ppo_epochs=2, **values).for_trainer(50)
    assert (args.num_total_batches, args.max_steps) == (rollouts, steps)


def test_optimizer_steps_are_rollouts_times_epochs_times_mini_batches(trainer):
    """Case 1; TRL 1.12 made 4, 4 and 4 steps."""
    for mini_batches, expected in ((1, 4), (2, 8), (4, 16)):
        run = trainer(num_mini_batches=mini_batches)
        run.train()
        assert run.state.global_step == run.args.max_steps == expected


# ---- Parsers, copies and files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_parsers_of_transformers_and_trl_take_the_config(parser):
    parser = parser(PPOConfig)
    text = parser.format_help()
    assert all(f"--{field.name}" in text for field in fields(PPOKnobs))
    flags = shlex.split(
        "--output_dir unused --use_cpu true --stop_token eos --total_episodes 64 --kl_estimator k2 --kl_target 6.5 "
        "--reward_weights 1 0.5 --critic adapter --critic_detach true --whiten_rewards --cliprange_high 0.28"
    )
    (config,) = parser.parse_args_into_dataclasses([*flags, "--model_init_kwargs", '{"dtype": "float32"}'])
    assert config == make(
        report_to=config.report_to,
        stop_token="eos",
        total_episodes=64,
        kl_estimator="k2",
        kl_target=6.5,
        reward_weights=[1.0, 0.5],
        critic="adapter",
        critic_detach=True,
        whiten_rewards=True,
        cliprange_high=0.28,
        model_init_kwargs={"dtype": "float32"},
    )


def test_a_recipes_keys_are_taken_by_trls_parser(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "output_dir: unused\nuse_cpu: true\nnum_mini_batches: 2\nstop_token: null\ngradient_accumulation_steps: 2\n"
    )
    (config,) = TrlParser(PPOConfig).parse_args_and_config(["--config", str(path), "--kl_coef", "0.1"])
    assert (config.num_mini_batches, config.stop_token, config.kl_coef) == (2, None, 0.1)


def test_dicts_json_pickles_and_copies_keep_every_field():
    config = make(stop_token="eos", reward_weights=[1.0], model_init_kwargs={"dtype": "float32"}, seed=3)
    for values in (config.to_dict(), json.loads(config.to_json_string())):
        assert PPOConfig(**{**values, "hub_token": None}) == config  # transformers blots out what is called *_token
    for other in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert other == config and other.batch_size == config.batch_size
    assert replace(config, seed=4) == make(
        stop_token="eos", reward_weights=[1.0], model_init_kwargs={"dtype": "float32"}, seed=4
    )


def test_the_hub_token_is_not_shown():
    config = make(hub_token="secret")
    assert "secret" not in f"{config!r} {config} {config.to_json_string()}"
