from __future__ import annotations

import re

import pytest

from trl_alpharl.cli.field_help import train_help
from trl_alpharl.fields import FIELDS, fields_of
from trl_alpharl.hf_fields import ModelFields, TrainingFields
from trl_alpharl.knobs import ARPOKnobs, PPOKnobs, PrefixedLowRankKnobs, ScriptKnobs


def listed(text: str) -> list[str]:
    return re.findall(r"^  --(\w+) ", text, re.MULTILINE)


def test_help_lists_our_knobs_and_the_model_s_once_each():
    sources = (ScriptKnobs, PPOKnobs, ARPOKnobs, PrefixedLowRankKnobs, ModelFields)
    ours = [field.name for source in sources for field in fields_of(source)]
    assert listed(train_help()) == ours


def test_help_all_adds_every_training_argument():
    names = listed(train_help(everything=True))
    assert sorted(names) == sorted(FIELDS)
    assert names[-len(fields_of(TrainingFields)) :] == [field.name for field in fields_of(TrainingFields)]


def test_an_entry_shows_values_meaning_and_default():
    text = train_help(everything=True)
    assert "  --kl_estimator k1|k2|k3\n      KL estimator: " in text
    for name, shown in {
        "kl_estimator": "[k1]",
        "use_peft": "[false]",
        "learning_rate": "[3e-06]",
        "run_name": "[none]",
        "debug": "[empty]",
    }.items():
        entry = text[text.index(f"  --{name} ") :].split("\n  --")[0]
        assert shown in entry.split("\n\n")[0], name


def test_fields_stand_under_the_comment_that_heads_them():
    sampling = train_help().split("\nSampling:\n")[1].split("\n\n")[0]
    assert listed(sampling)[0] == "response_length"
    assert {"temperature", "stop_token"} < set(listed(sampling))
    assert "learning_rate" not in listed(sampling)


@pytest.mark.parametrize("columns", [40, 80, 300])
def test_lines_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    prose = [line for line in train_help(everything=True).splitlines() if line.startswith("      ")]
    assert max(map(len, prose)) <= min(columns, 120)
