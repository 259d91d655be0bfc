"""What reaches the hub, which is a fake: whole checkpoints, without what only a resumed run reads."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects

SAVES = {"save_strategy": "steps", "save_steps": 1, "total_episodes": 8}  # two optimizer steps


def checkpoint_names(run):
    return sorted(path.name for path in Path(run.args.output_dir).glob("checkpoint-*"))


@pytest.fixture
def hub(monkeypatch):
    """A hub that notes each upload and which files there were at that moment."""
    uploads = []

    def upload_folder(self, *, folder_path, ignore_patterns=None, path_in_repo=None, run_as_future=False, **kwargs):
        names = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        uploads.append(
            SimpleNamespace(
                folder=Path(folder_path).name,
                where=path_in_repo,
                files=set(filter_repo_objects(names, ignore_patterns=ignore_patterns)),
                message=kwargs["commit_message"],
            )
        )
        if not run_as_future:
            return None
        future = Future()
        if uploads[-1].folder not in uploads_that_hang:
            future.set_result(None)
        return future

    uploads_that_hang = set()
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **kwargs: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return SimpleNamespace(uploads=uploads, hang=uploads_that_hang)


MODEL_FILES = {"config.json", "model.safetensors", "critic/model.safetensors", "tokenizer.json", "README.md"}


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("every_save", [None]),
        ("checkpoint", [None, "last-checkpoint"]),
        ("all_checkpoints", [None, "checkpoint-1"]),
        ("end", []),
    ],
)
def test_checkpoints_are_pushed_whole(trainer, hub, strategy, places):
    run = trainer(**SAVES, max_steps=1, push_to_hub=True, hub_strategy=strategy, hub_token="secret")
    run.train()
    assert [upload.where for upload in hub.uploads] == places
    for upload in hub.uploads:
        assert upload.folder == "checkpoint-1" and upload.files >= MODEL_FILES
        assert upload.message.startswith("Training in progress, step 1")
        run_state = {"optimizer.pt", "rng_state.pth", "controllers.json", "rollout.safetensors", "manifest.json"}
        assert upload.files & run_state == (set() if upload.where is None else run_state)
    for path in Path(run.args.output_dir).rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes(), path


def test_push_to_hub_at_the_end(trainer, hub):
    run = trainer(**SAVES, push_to_hub=True, hub_strategy="end")
    run.train()
    run.push_to_hub()
    (upload,) = hub.uploads
    assert upload.where is None and upload.files >= MODEL_FILES
    assert not any(name.startswith(("checkpoint-", ".saving")) for name in upload.files)


def test_a_checkpoint_is_not_deleted_under_its_upload(trainer, hub):
    hub.hang.add("checkpoint-1")
    run = trainer(**{**SAVES, "total_episodes": 16}, max_steps=3, save_total_limit=1, push_to_hub=True)
    run._finish_current_push = lambda: None  # it would wait for the upload that hangs
    run.train()
    assert checkpoint_names(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert [upload.folder for upload in hub.uploads] == ["checkpoint-1"]  # later ones wait for it
    for job in run.push_in_progress.jobs:
        job.set_result(None)
    run.state.global_step = 4
    run._save_checkpoint(run.model, None)
    assert checkpoint_names(run) == ["checkpoint-4"]
    assert [upload.folder for upload in hub.uploads] == ["checkpoint-1", "checkpoint-4"]
