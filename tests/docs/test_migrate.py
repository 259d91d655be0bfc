"""docs/migrate.md names every field of TRL 1.12 and only fields that exist, and its code runs."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from trl_alpharl import PPOConfig
from trl_alpharl.trainers.notices import REPAIRED
from trl_alpharl.trainers.ppo_config import COMPUTED, OTHER_NAMES

pytestmark = pytest.mark.trl_compat
PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
OURS = {field.name for field in fields(PPOConfig)}


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


def rows(text: str) -> dict[str, str]:
    """First column -> second column, for every name in backquotes in the first."""
    found = re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE)
    return {name: says for names, says in found for name in re.findall(r"`(\w+)`", names)}


def test_every_field_of_1_12_has_a_row():
    ppo = pytest.importorskip("trl.experimental.ppo", exc_type=ImportError)
    own = set(inspect.get_annotations(ppo.PPOConfig))
    assert own <= rows(section("Fields")).keys()
    assert len(own) == 33


def test_every_row_is_a_field_or_a_computed_size():
    table = rows(section("Fields"))
    assert len(table) == 33 + 9  # 1.12's own, and those of TrainingArguments
    assert table.keys() <= OURS | set(COMPUTED)
    assert {name for name, says in table.items() if says.startswith("**computed**")} == set(COMPUTED)


def test_rows_marked_as_repaired_are_those_with_a_notice():
    marked = {name for name, says in rows(section("Fields")).items() if says.startswith("**repaired**")}
    assert marked == set(REPAIRED) | {"logging_steps", "lr_scheduler_type"}  # harmless where they differ; no notice


def test_fields_named_in_the_text_exist():
    for text in ("Swap the class", "Fields"):
        for says in rows(section(text)).values():
            for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", says):
                assert name in OURS | set(COMPUTED) | {"reward_funcs", "eval_dataset", "grad_norm"}, name


def test_names_of_other_trainers_are_translated_as_the_config_does():
    pairs = re.findall(r"`(\w+)` -> `(\w+)`", section("GRPO-style scripts"))
    assert len(pairs) == 4
    for theirs, ours in pairs:
        assert OTHER_NAMES[theirs] == ours


def test_the_code_runs(model, tokenizer, tmp_path, monkeypatch):
    """Each block with a tiny model in place of the named one, and one rollout."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        block = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "tiny")
        block = block.replace("total_episodes=512", "total_episodes=8, use_cpu=True, disable_tqdm=True")
        exec(compile(block, "migrate.md", "exec"), names)
    assert names["trainer"].state.global_step == 4
