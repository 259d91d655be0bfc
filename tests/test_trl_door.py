"""`_trl.py`: every TRL name comes through it; one that is gone fails at import with its name and the tested range."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import trl
from packaging.version import Version
from transformers import Trainer, TrainingArguments

from trl_alpharl import _trl

pytestmark = pytest.mark.trl_compat


def test_the_running_trl_is_in_the_tested_range():
    oldest, newest = (Version(version) for version in _trl.TESTED.split(" to "))
    assert oldest <= Version(trl.__version__) <= newest


def test_what_comes_through_is_what_it_is_taken_for():
    assert issubclass(_trl.BaseTrainer, Trainer)
    assert issubclass(_trl.BaseConfig, TrainingArguments)
    assert _trl.is_conversational({"prompt": [{"role": "user", "content": "w5"}]})
    assert not _trl.is_conversational({"prompt": "w5"})


@pytest.mark.parametrize("module, name", [("trl", "NoSuchName"), ("trl.no_such_module", "TrlParser")])
def test_a_missing_name_is_told_with_the_tested_range(module, name):
    with pytest.raises(ImportError) as error:
        _trl._take(module, name)
    message = str(error.value)
    assert "\n" not in message
    for part in (f"TRL {trl.__version__}", f"`{module}.{name}`", _trl.TESTED):
        assert part in message


def test_a_name_that_a_release_moved_away_fails_when_the_door_is_imported(monkeypatch):
    real = importlib.import_module

    def without_the_base_trainer(name, *args):
        if name == "trl.trainer.base_trainer":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without_the_base_trainer)
    spec = importlib.util.spec_from_file_location("another_door", _trl.__file__)
    with pytest.raises(ImportError, match=r"no `trl\.trainer\.base_trainer\._BaseTrainer`, which trl-alpharl needs"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_trls_usage_ping_is_not_sent(trainer, monkeypatch):
    sent = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *args, **kwargs: sent.append(args))
    monkeypatch.delenv("CI", raising=False)  # where it is set TRL itself sends nothing
    run = trainer()
    assert sent == []
    _trl.BaseTrainer._send_telemetry(run)  # the name is still the one that TRL calls
    assert len(sent) == 1
