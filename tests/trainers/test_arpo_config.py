"""ARPOConfig: what a script leaves open, what it sets, and what is refused."""

from __future__ import annotations

import copy
import json
import shlex
from dataclasses import fields, replace

import pytest

from trl_alpharl import ARPOConfig, PPOConfig
from trl_alpharl._trl import TrlParser
from trl_alpharl.knobs import ARPOKnobs, PPOKnobs
from trl_alpharl.trainers import arpo_config
from trl_alpharl.trainers.arpo_presets import DEPENDENT
from trl_alpharl.trainers.notices import repaired_fields


def make(**changes):
    return ARPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **changes})


class TestOpenFields:
    def test_preset_ppo_is_ppo_s_configuration(self):
        ours = make(preset="ppo")
        plain = PPOConfig(output_dir="unused", use_cpu=True, report_to="none")
        own = {field.name for field in fields(ARPOKnobs)} | {"run_name", "logging_dir"}
        for field in fields(PPOConfig):
            if field.name not in own:
                assert getattr(ours, field.name) == getattr(plain, field.name), field.name

    @pytest.mark.parametrize(
        ("name", "value"),
        [("num_mini_batches", 1), ("kl_coef", 0.05), ("gamma", 1.0), ("adam_beta2", 0.999), ("warmup_steps", 0)],
    )
    def test_a_value_that_is_set_wins_over_the_preset_also_when_it_is_ppo_s_default(self, name, value):
        assert getattr(make(preset="paper", **{name: value}), name) == value
        assert getattr(make(reward_kind="verifiable", **{name: value}), name) == value

    def test_a_switch_of_a_preset_can_be_turned_off_alone(self):
        config = make(preset="paper", entropy_control="none", reward_scaling="none", kl_stop=0.0)
        assert config.entropy_form is config.entropy_coef is config.reward_clip is None
        assert config.epsilon_mix == 0.1 and config.lam_end == 0.85

    @pytest.mark.parametrize(("rows", "expected"), [((8, 4), 4), ((1, 6), 3), ((1, 1), 1), ((2, 5), 2)])
    def test_mini_batches_of_a_preset_divide_the_rollout(self, rows, expected):
        config = make(per_device_train_batch_size=rows[0], gradient_accumulation_steps=rows[1])
        assert config.num_mini_batches == expected

    def test_mini_batches_that_are_set_must_divide_it(self):
        with pytest.raises(ValueError, match="num_mini_batches is 4, which does not divide"):
            make(num_mini_batches=4, per_device_train_batch_size=1, gradient_accumulation_steps=6)

    def test_sigma_min_follows_the_kind_of_reward(self):
        assert make(reward_kind="verifiable", reward_scaling="robust").reward_sigma_min == 1.0
        assert make(reward_kind="drifting").reward_sigma_min == 0.0
        assert make(reward_kind="verifiable", reward_scaling="robust", reward_sigma_min=0.2).reward_sigma_min == 0.2


class TestRefused:
    @pytest.mark.parametrize("name", sorted(DEPENDENT))
    def test_a_field_that_would_change_nothing(self, name):
        """Also when it is set to its default."""
        with pytest.raises(ValueError, match=f"{name} is .*, which changes nothing: "):
            make(preset="ppo", **{name: DEPENDENT[name].default})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"preset": "best"}, "preset is 'best'; it must be one of 'tuned', 'paper', 'ppo'"),
            ({"preset": "paper", "reward_kind": "graded"}, "reward_kind is 'graded', but only preset 'tuned' reads it"),
            ({"reward_scaling": "zscore"}, "reward_scaling is 'zscore'; it must be one of"),
            ({"replay_ratio": 1.0}, "replay_ratio is 1.0; it must be in"),
            ({"epsilon_mix": -0.1}, "epsilon_mix is -0.1; it must be in"),
            ({"screening": 1}, "screening is 1; it must be 0, or a whole number from 2 on"),
            ({"screening": 3}, "screening is 3; twice that must divide the rollout of 64"),
            ({"reuse_surge": 0.5}, "reuse_surge is 0.5; it must be above 1"),
            ({"kl_stop": 0.01, "num_ppo_epochs": 1}, "kl_stop is 0.01, which changes nothing with num_ppo_epochs 1"),
            ({"reuse_surge": 2.0, "num_ppo_epochs": 1}, "reuse_surge is 2.0, which changes nothing"),
            ({"lam_end": 0.9, "lam_length_scale": 0.05}, "lam_length_scale and lam_end are both set"),
            ({"entropy_control": "dual", "entropy_coef_max": 0.0}, "entropy_coef_min is 0.0; it must be below"),
            ({"norm_noise": 1e-5}, "norm_noise_end is 0.0001; it must be at most norm_noise"),
            ({"popart": True, "vf_coef": 0.0}, "popart is on, but vf_coef is 0"),
            ({"lam": 2.0}, "lam is 2.0; it must be between 0 and 1"),
            ({"replay_ratio": 0.5, "replay_size": 0}, "replay_size is 0; it must be a whole number, at least 1"),
            ({"logit_noise": float("nan")}, "logit_noise is nan; it must be 0 or more"),
            ({"replay_ratio": "0.5"}, "replay_ratio is '0.5'; it must be in"),
            ({"preset": "paper", "kl_target": 1.0}, "kl_coef is 0, which kl_target cannot steer"),
        ],
    )
    def test_what_cannot_work_is_one_line(self, changes, message):
        sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}
        with pytest.raises(ValueError, match=message) as error:
            make(**{**sizes, **changes})
        assert "\n" not in str(error.value)

    def test_what_the_preset_chose_and_cannot_work_lies_still(self):
        assert make(preset="paper", num_ppo_epochs=1).kl_stop == 0.008

    def test_fp16_scales_what_the_reuse_gate_watches(self):
        config = make(reuse_surge=2.0)
        config.fp16 = True
        with pytest.raises(ValueError, match="reuse_surge: fp16"):
            arpo_config._check_together(config, set())  # on a CPU, fp16 is refused before that


class TestForms:
    @pytest.mark.parametrize("preset", ["tuned", "paper", "ppo"])
    def test_copies_are_equal(self, preset):
        config = make(preset=preset)
        again = replace(config, seed=5)
        for field in fields(ARPOKnobs):
            assert getattr(again, field.name) == getattr(config, field.name), field.name
        assert copy.deepcopy(config).kl_coef == config.kl_coef

    def test_what_it_decided_is_written_down(self):
        written = json.loads(make(reward_kind="verifiable").to_json_string())
        assert (written["replay_ratio"], written["adam_beta2"], written["kl_stop"]) == (0.75, 0.95, 0.0)

    @pytest.mark.trl_compat
    def test_trl_s_parser_reads_every_field(self, tmp_path):
        flags = "--preset paper --entropy_control pi --entropy_ki 0.5 --shaping_rewards a b --popart true --screening 2"
        (config,) = TrlParser((ARPOConfig,)).parse_args_and_config(
            [*shlex.split(flags), "--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none"]
        )
        assert (config.entropy_control, config.entropy_ki, config.screening) == ("pi", 0.5, 2)
        assert config.shaping_rewards == ["a", "b"] and config.popart is True
        assert config.adam_beta2 == 0.99 and config.kl_coef == 0.0  # open: the preset's

    def test_no_name_is_taken_twice(self):
        assert not {field.name for field in fields(ARPOKnobs)} & {field.name for field in fields(PPOKnobs)}

    def test_notices_are_about_what_a_script_sets(self):
        assert not [line for line in repaired_fields(make()) if line.startswith(("num_mini", "warmup"))]
        assert [line for line in repaired_fields(make(num_mini_batches=2)) if line.startswith("num_mini_batches=2")]
