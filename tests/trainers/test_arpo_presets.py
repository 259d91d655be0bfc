"""The tables of presets and dependent fields are whole and hang together."""

from __future__ import annotations

from dataclasses import fields

import pytest

from trl_alpharl import ARPOConfig
from trl_alpharl.knobs import ARPOKnobs
from trl_alpharl.trainers.arpo_presets import DEPENDENT, OFF, PAPER, TUNED, preset_values

PRESETS = [
    ("tuned", None),
    ("tuned", "verifiable"),
    ("tuned", "graded"),
    ("tuned", "drifting"),
    ("paper", None),
    ("ppo", None),
]


def make(**changes):
    return ARPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **changes})


def test_every_field_is_a_switch_or_hangs_on_one():
    free = {"preset", "reward_kind", "shaping_rewards", "lam_end"}
    assert {*OFF, *DEPENDENT, *free} == {field.name for field in fields(ARPOKnobs)}
    assert not set(OFF) & set(DEPENDENT)


@pytest.mark.parametrize("values", [PAPER, *TUNED.values()])
def test_presets_name_fields_of_the_config(values):
    assert set(values) <= {field.name for field in fields(ARPOConfig)}


def test_every_preset_sets_every_switch():
    for preset, kind in PRESETS:
        assert set(OFF) <= set(preset_values(preset, kind))


@pytest.mark.parametrize(("preset", "kind"), PRESETS)
def test_a_preset_is_what_it_says(preset, kind):
    """The config holds each value of its preset; switches that it does not name are off."""
    config = make(preset=preset, reward_kind=kind, per_device_train_batch_size=8)
    for name, value in preset_values(preset, kind).items():
        assert getattr(config, name) == value, name


def test_presets_by_measurement():
    """What docs/arpo.md says of them, in short."""
    verifiable, graded, drifting = (make(reward_kind=kind) for kind in ("verifiable", "graded", "drifting"))
    assert (verifiable.replay_ratio, verifiable.adam_beta2, verifiable.num_mini_batches) == (0.75, 0.95, 2)
    assert (verifiable.reward_scaling, verifiable.curriculum, verifiable.success_target) == ("none", "success", 0.5)
    assert (graded.replay_ratio, graded.num_mini_batches, graded.adam_beta2) == (0, 4, 0.999)
    assert (graded.reward_scaling, drifting.reward_scaling) == ("none", "robust")
    assert graded.kl_coef == drifting.kl_coef == 0.008
    assert (make().num_mini_batches, make().kl_coef) == (4, 0.008)  # without a kind: graded


def test_paper_is_the_description():
    paper = make(preset="paper")
    assert (paper.gamma, paper.lam, paper.lam_end, paper.entropy_coef) == (0.99, 0.95, 0.85, 0.01)
    assert (paper.kl_coef, paper.kl_stop, paper.adam_beta2, paper.warmup_steps) == (0.0, 0.008, 0.99, 0.05)
    assert (paper.reward_scaling, paper.entropy_control, paper.epsilon_mix) == ("robust", "dual", 0.1)


def test_defaults_of_dependent_fields_appear_with_their_switch():
    config = make(preset="ppo", entropy_control="pi", popart=True)
    for name in ("entropy_coef", "entropy_kp", "entropy_ki", "entropy_start", "popart_decay"):
        assert getattr(config, name) == DEPENDENT[name].default
    for name in ("entropy_rate", "replay_size", "reward_clip"):
        assert getattr(config, name) is None
