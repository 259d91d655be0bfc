"""Checkpoints: whole or absent, exact on resume, also in the middle of a rollout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import PushInProgress
from transformers.utils.hub import hf_api

from .. import __version__
from ..records import Advantages, Rollout, Scored
from ..roles import saving

MANIFEST = "manifest.json"
CONTROLLERS = "controllers.json"
ROLLOUT = "rollout.safetensors"
ARGUMENTS = "training_args.json"
STAGING = ".saving"
# Files of a checkpoint that only a resumed run reads; a model repository does without them.
RUN_STATE = ["*.pt", "*.pth", "trainer_state.json", "controllers*.json", "rollout*.safetensors", MANIFEST]
RUN_STATE += ["replay*.safetensors", "curriculum*.safetensors"]


class CheckpointMixin:
    """The trainer's saving and loading."""

    _staging: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Policy (plain transformers or peft), tokenizer, arguments, and the critic beside in `critic/`."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        saving.save_policy(self.model, folder)
        saving.save_critic(self.model, folder / "critic")
        self.processing_class.save_pretrained(folder)
        (folder / ARGUMENTS).write_text(self.user_args.to_json_string())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place, move it there when it is whole, then push it and delete old ones."""
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"checkpoint-{self.state.global_step}"
        self.create_model_card(model_name=Path(self.args.output_dir).name)
        with self._staged(run_dir / STAGING) as staging:
            super()._save_checkpoint(model, trial)
            checkpoint = staging / final.name
            self._save_run_state(checkpoint, final)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                if self.is_world_process_zero():
                    shutil.copy(Path(self.args.output_dir) / "README.md", checkpoint)
                self._write_manifest(checkpoint)
                _put_in_place(checkpoint, final)
        self.accelerator.wait_for_everyone()
        uploading = self._uploading()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save and not uploading:  # an older checkpoint may still be read by its upload
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run_dir), self.args.save_total_limit, best, use_mtime=True)

    @contextmanager
    def _staged(self, staging: Path) -> Iterator[Path]:
        """transformers' own saving goes to `staging` and pushes nothing; what a crash left there goes."""
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        push, self.args.push_to_hub = self.args.push_to_hub, False
        self._staging = str(staging)
        try:
            yield staging
        finally:
            self._staging = None
            self.args.push_to_hub = push
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)

    def _save_run_state(self, checkpoint: Path, final: Path) -> None:
        """What training needs beside weights and optimizer: controllers, metric sums, the rollout in use."""
        if self.state.best_model_checkpoint == str(checkpoint):  # transformers noted the staging place
            self.state.best_model_checkpoint = str(final)
            if self.args.should_save:
                self.state.save_to_json(str(checkpoint / "trainer_state.json"))
        if self.args.save_only_model:
            return
        state = {name: controller.state_dict() for name, controller in self._controllers().items()}
        (checkpoint / _rank_file(CONTROLLERS, self.args)).write_text(json.dumps(state))
        for name, store in self._stores().items():
            save_file(store.tensors(), checkpoint / _rank_file(f"{name}.safetensors", self.args))
        if self._experience is not None:
            save_experience(self._experience, checkpoint / _rank_file(ROLLOUT, self.args))

    def _stores(self) -> dict[str, Any]:
        """Everything with a state of tensors (`tensors`, `load_tensors`), by the name of its file."""
        return {}

    def _controllers(self) -> dict[str, Any]:
        """Everything with a state of plain numbers, by name."""
        return {"kl": self.kl_controller, "metrics": self.metrics, "faults": self.faults}

    def _write_manifest(self, checkpoint: Path) -> None:
        manifest = {
            "format": 1,
            "trl_alpharl": __version__,
            "step": self.state.global_step,
            "save_only_model": self.args.save_only_model,
            "run": _sizes(self.args, self.model.critic),
            "optimizer": _optimizer_settings(self.args),
            "files": {
                path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
                for path in sorted(checkpoint.rglob("*"))
                if path.is_file()
            },
        }
        (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=1))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load policy, critic, controllers and the rollout in use; the optimizer follows from transformers."""
        checkpoint = Path(resume_from_checkpoint)
        check_resumable(checkpoint, self.args, self.model.critic)
        self._load_weights(checkpoint)
        state = json.loads((checkpoint / _rank_file(CONTROLLERS, self.args)).read_text())
        for name, controller in self._controllers().items():
            if name not in state:
                raise ValueError(f"{checkpoint} has no state of {name!r}: the run that saved it had that switched off.")
            controller.load_state_dict(state[name])
        for name, store in self._stores().items():
            file = checkpoint / _rank_file(f"{name}.safetensors", self.args)
            if not file.is_file():
                raise ValueError(f"{checkpoint} has no {file.name}: the run that saved it had {name} switched off.")
            store.load_tensors(load_file(file))
        rollout = checkpoint / _rank_file(ROLLOUT, self.args)
        self._experience = load_experience(rollout, self.accelerator.device) if rollout.is_file() else None

    def _load_best_model(self) -> None:
        """Load policy and critic of the best checkpoint."""
        best = Path(self.state.best_model_checkpoint)
        check_manifest(best)
        self._load_weights(best)

    def _load_weights(self, checkpoint: Path) -> None:
        saving.load_policy(self.model, checkpoint)
        saving.load_critic(self.model, checkpoint / "critic")

    # The hub

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint's models, and the checkpoint itself where hub_strategy says so, in the background.

        Unlike transformers' own, it pushes the critic too and no pickle of the arguments, which would hold the token.
        """
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if self._uploading() and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        jobs = [self._upload(checkpoint_folder, message, ignore_patterns=RUN_STATE)]
        if args.hub_strategy == HubStrategy.CHECKPOINT:
            jobs.append(self._upload(checkpoint_folder, f"{message}, checkpoint", path_in_repo="last-checkpoint"))
        elif args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            name = Path(checkpoint_folder).name
            jobs.append(self._upload(checkpoint_folder, f"{message}, checkpoint", path_in_repo=name))
        if self._uploading():
            jobs = [*self.push_in_progress.jobs, *jobs]
        self.push_in_progress = PushInProgress(jobs)

    def _upload(self, folder: str, message: str, **where: Any) -> Any:
        return hf_api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=folder,
            commit_message=message,
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            run_as_future=True,
            **where,
        )

    def _uploading(self) -> bool:
        push = getattr(self, "push_in_progress", None)
        return push is not None and not push.is_done()


def _put_in_place(checkpoint: Path, final: Path) -> None:
    """Move a whole checkpoint to its place; one of an earlier run that is in the way goes first, in one move too."""
    if final.exists():
        os.replace(final, checkpoint.with_name("replaced"))
    os.replace(checkpoint, final)


def check_manifest(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's manifest. Raises ValueError, naming the file, unless all of the checkpoint is as it was saved."""
    if not (checkpoint / MANIFEST).is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of this trainer: {MANIFEST} is missing.")
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except ValueError as error:
        raise ValueError(f"{checkpoint} is damaged: {MANIFEST} cannot be read.") from error
    for name, saved in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{checkpoint} is damaged: {name} is missing.")
        if path.stat().st_size != saved["bytes"]:
            size = path.stat().st_size
            raise ValueError(f"{checkpoint} is damaged: {name} should have {saved['bytes']} bytes, found {size}.")
        if _digest(path) != saved["sha256"]:
            raise ValueError(f"{checkpoint} is damaged: {name} is not what was saved (its checksum differs).")
    return manifest


def check_resumable(checkpoint: Path, args: Any, critic: str) -> None:
    """Raise ValueError, naming the file or the field, when a run with these arguments and this kind of critic
    (`shared`, `adapter` or `model`) cannot go on from the checkpoint."""
    manifest = check_manifest(checkpoint)
    if manifest["save_only_model"]:
        raise ValueError(f"{checkpoint} was saved with save_only_model: it has no optimizer to resume with.")
    for name, size in _sizes(args, critic).items():
        if manifest["run"][name] != size:
            raise ValueError(f"{checkpoint} was saved with {name}={manifest['run'][name]!r}; this run has {size!r}.")
    saved = manifest.get("optimizer", {})  # a checkpoint of an earlier version does not say
    now = _optimizer_settings(args)
    for name in ("optim", "own_critic_learning_rate"):
        if name in saved and saved[name] != now[name]:
            raise ValueError(f"{checkpoint} was saved with {name}={saved[name]!r}; this run has {now[name]!r}.")
    changed = [f"{name} {now[name]!r} (saved: {value!r})" for name, value in saved.items() if now[name] != value]
    if changed:
        warnings.warn(
            f"resuming goes on with the optimizer of {checkpoint}; no effect: {', '.join(changed)}.", stacklevel=2
        )


def _optimizer_settings(args: Any) -> dict[str, Any]:
    """What the optimizer's saved state holds, or what its shape depends on: a resumed run cannot change it."""
    names = ("learning_rate", "critic_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    return {
        "optim": str(getattr(args.optim, "value", args.optim)),
        "own_critic_learning_rate": args.critic_learning_rate is not None,
    } | {name: getattr(args, name) for name in names}


def _sizes(args: Any, critic: str) -> dict[str, Any]:
    """What a resumed run must share with the run that saved, or its rollouts and optimizer would not line up."""
    names = ("world_size", "batch_size", "num_ppo_epochs", "num_mini_batches", "seed", "data_seed")
    return {"critic": critic} | {name: getattr(args, name) for name in names}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rank_file(name: str, args: Any) -> str:
    stem, suffix = name.split(".")
    return name if args.world_size == 1 else f"{stem}_{args.process_index}.{suffix}"


# The rollout record

_ROLLOUT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "finished")
_ROLLOUT += ("dataset_rows", "behavior_logps")
_SCORED = ("old_per_token_logps", "ref_per_token_logps", "values", "entropies", "scores", "valid", "rewards")
_ADVANTAGES = ("mask", "token_rewards", "advantages", "returns")
_MAY_BE_NONE = ("dataset_rows", "behavior_logps", "rewards")


def save_experience(experience: Advantages, path: Path) -> None:
    """Write a rollout record. The dataset rows are not in it: the rewards have already seen them."""
    scored = experience.scored
    parts = ((scored.rollout, _ROLLOUT), (scored, _SCORED), (experience, _ADVANTAGES))
    tensors = {name: getattr(part, name) for part, names in parts for name in names}
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items() if tensor is not None}
    facts = {"index": scored.rollout.index, "replayed": scored.rollout.replayed}
    facts |= {"finite": scored.finite, "cause": scored.cause}
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})


def load_experience(path: Path, device: torch.device) -> Advantages:
    """What `save_experience` wrote, on `device`, with no dataset rows."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
    tensors = dict.fromkeys(_MAY_BE_NONE) | {name: tensor.to(device) for name, tensor in load_file(path).items()}
    sizes = {"index": facts["index"], "replayed": facts["replayed"]}
    rollout = Rollout(**sizes, examples=[], **{name: tensors[name] for name in _ROLLOUT})
    scored = Scored(
        rollout=rollout, finite=facts["finite"], cause=facts["cause"], **{name: tensors[name] for name in _SCORED}
    )
    return Advantages(scored=scored, **{name: tensors[name] for name in _ADVANTAGES})
