"""The cache of the embedded model: whole or absent, checked by content, never in the way."""

import json
from pathlib import Path

import pytest
import torch

from trl_alpharl.builtin import cache, pretrain
from trl_alpharl.builtin.corpus import stories
from trl_alpharl.builtin.model import build_model
from trl_alpharl.builtin.tokenizer import build_tokenizer


@pytest.fixture
def builds(monkeypatch):
    """Replaces pre-training by an untrained model; the list holds the seeds that were built."""
    seeds = []

    def untrained(seed):
        seeds.append(seed)
        tokenizer = build_tokenizer(stories(50, seed=0))
        return build_model(tokenizer, seed).eval(), tokenizer

    monkeypatch.setattr(pretrain, "pretrain", untrained)
    return seeds


def entry(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


def test_built_once_and_then_read_bit_for_bit(builds, tmp_path):
    first, _ = pretrain.load_builtin(3, tmp_path)
    second, tokenizer = pretrain.load_builtin(3, tmp_path)
    assert builds == [3]
    expected = build_model(build_tokenizer(stories(50, seed=0)), 3).state_dict()
    for model in (first, second):
        assert not model.training
        assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_each_seed_has_its_entry(builds, tmp_path):
    for seed in (0, 1, 0, 1):
        pretrain.load_builtin(seed, tmp_path)
    assert builds == [0, 1]


def test_each_version_of_the_code_has_its_entry(builds, tmp_path, monkeypatch):
    pretrain.load_builtin(0, tmp_path)
    monkeypatch.setattr(cache, "source_hash", lambda: "another")
    pretrain.load_builtin(0, tmp_path)
    assert builds == [0, 0]


def truncate_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def change_one_weight(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def lose_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def lose_checksums(folder):
    (folder / "checksums.json").unlink()


def garble_checksums(folder):
    (folder / "checksums.json").write_text("{", encoding="utf-8")


def empty_folder(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "checksums.json").write_text("{}", encoding="utf-8")


DAMAGES = [truncate_weights, change_one_weight, lose_tokenizer, lose_checksums, garble_checksums, empty_folder]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_built_again(damage, builds, tmp_path):
    pretrain.load_builtin(0, tmp_path)
    damage(entry(tmp_path))
    pretrain.load_builtin(0, tmp_path)
    assert builds == [0, 0]
    assert cache.is_intact(entry(tmp_path))


def test_a_place_that_cannot_be_written_fails_nothing(builds, tmp_path, caplog):
    (tmp_path / "file").write_text("", encoding="utf-8")
    model, tokenizer = pretrain.load_builtin(0, tmp_path / "file" / "below")
    assert len(tokenizer) == model.config.vocab_size
    assert "not cached" in caplog.text


def test_an_interrupted_write_leaves_nothing(builds, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    model, tokenizer = pretrain.pretrain(0)
    monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.store(tmp_path / "entry", model, tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_store_at_once(builds, tmp_path, monkeypatch):
    """The other process' folder appears just before ours is moved: ours is dropped, theirs stays."""
    model, tokenizer = pretrain.pretrain(0)
    folder = tmp_path / "entry"
    real_replace = cache.os.replace

    def late(source, target):
        monkeypatch.setattr(cache.os, "replace", real_replace)
        cache.store(folder, model, tokenizer)
        real_replace(source, target)

    monkeypatch.setattr(cache.os, "replace", late)
    cache.store(folder, model, tokenizer)
    assert cache.is_intact(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_checksums_name_every_file(builds, tmp_path):
    pretrain.load_builtin(0, tmp_path)
    names = {path.name for path in entry(tmp_path).iterdir()} - {"checksums.json"}
    assert set(json.loads((entry(tmp_path) / "checksums.json").read_text(encoding="utf-8"))) == names
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_root() == tmp_path / "trl-alpharl"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_root() == tmp_path / ".cache" / "trl-alpharl"


def test_the_version_covers_every_file_that_shapes_the_weights():
    """A new file of the room is either in the hash or named here as one that changes no weight."""
    without_effect = {"__init__.py", "cache.py", "dataset.py", "reward.py"}
    assert {path.name for path in Path(cache.__file__).parent.glob("*.py")} == without_effect | set(cache._SOURCES)
