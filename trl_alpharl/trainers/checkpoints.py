"""Checkpoints: whole or absent, exact on resume, also in the middle of a rollout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import rotate_checkpoints

from .. import __version__
from ..records import Advantages, Rollout, Scored
from ..roles import saving

MANIFEST = "manifest.json"
CONTROLLERS = "controllers.json"
ARGUMENTS = "training_args.json"
STAGING = ".saving"


class CheckpointMixin:
    """The trainer's saving and loading."""

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Policy (plain transformers or peft), tokenizer, arguments, and the critic beside in `critic/`."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        saving.save_policy(self.model, folder)
        saving.save_critic(self.model, folder / "critic")
        self.processing_class.save_pretrained(folder)
        (folder / ARGUMENTS).write_text(self.args.to_json_string())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place and move it there when it is whole."""
        with self._staged_checkpoint(trial) as staging:
            super()._save_checkpoint(model, trial)
            checkpoint = staging / f"checkpoint-{self.state.global_step}"
            self._save_run_state(checkpoint)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._write_manifest(checkpoint)

    @contextmanager
    def _staged_checkpoint(self, trial: Any) -> Iterator[Path]:
        run_dir = Path(self._get_output_dir(trial))
        staging = run_dir / STAGING
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)  # what a crash left behind
        self.accelerator.wait_for_everyone()
        push, self.args.push_to_hub = self.args.push_to_hub, False  # pushed from its final place below
        self._get_output_dir = lambda trial: str(staging)
        try:
            yield staging
        finally:
            del self._get_output_dir
            self.args.push_to_hub = push
        if self.args.should_save:
            final = run_dir / name
            shutil.rmtree(final, ignore_errors=True)
            os.replace(staging / name, final)
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _save_run_state(self, checkpoint: Path) -> None:
        """What training needs beside weights and optimizer: controllers, metric sums, the rollout in use."""
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            if best is not None and STAGING in Path(best).parts:  # transformers saw the staging place
                final = Path(self._checkpoint_home()) / Path(best).name
                self.state.best_model_checkpoint = str(final)
                self.state.save_to_json(str(checkpoint / "trainer_state.json"))
            if not self.args.save_only_model:
                self.create_model_card(model_name=Path(self.args.output_dir).name)
        if self.args.save_only_model:
            return
        state = {name: controller.state_dict() for name, controller in self._controllers().items()}
        (checkpoint / _rank_file(CONTROLLERS, self.args)).write_text(json.dumps(state))
        if self._experience is not None:
            path = checkpoint / _rank_file("rollout.safetensors", self.args)
            save_file(_experience_tensors(self._experience), path, metadata=_experience_facts(self._experience))

    def _checkpoint_home(self) -> str:
        return self.args.output_dir

    def _controllers(self) -> dict[str, Any]:
        """Everything with a state of plain numbers, by name."""
        return {"kl": self.kl_controller, "metrics": self.metrics, "faults": self.faults}

    def _write_manifest(self, checkpoint: Path) -> None:
        files = {
            str(path.relative_to(checkpoint)): path.stat().st_size
            for path in sorted(checkpoint.rglob("*"))
            if path.is_file()
        }
        manifest = {"format": 1, "trl_alpharl": __version__, "step": self.state.global_step, "files": files}
        (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=1))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load policy, critic, controllers and the rollout in use; the optimizer follows from transformers."""
        checkpoint = Path(resume_from_checkpoint)
        check_manifest(checkpoint)
        self._load_weights(checkpoint)
        controllers = checkpoint / _rank_file(CONTROLLERS, self.args)
        if not controllers.is_file():
            raise ValueError(
                f"{checkpoint} has no {controllers.name}; it was saved with save_only_model or by more processes."
            )
        state = json.loads(controllers.read_text())
        for name, controller in self._controllers().items():
            controller.load_state_dict(state[name])
        rollout = checkpoint / _rank_file("rollout.safetensors", self.args)
        self._experience = _load_experience(rollout, self.accelerator.device) if rollout.is_file() else None

    def _load_best_model(self) -> None:
        """Load policy and critic of the best checkpoint."""
        self._load_weights(Path(self.state.best_model_checkpoint))

    def _load_weights(self, checkpoint: Path) -> None:
        saving.load_policy(self.model, checkpoint)
        saving.load_critic(self.model, checkpoint / "critic")


def check_manifest(checkpoint: Path) -> None:
    """Raise ValueError, naming the file, unless a checkpoint folder is whole."""
    if not (checkpoint / MANIFEST).is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of this trainer: {MANIFEST} is missing.")
    for name, size in json.loads((checkpoint / MANIFEST).read_text())["files"].items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
            raise ValueError(f"{checkpoint} is damaged: {name} should have {size} bytes, found {found}.")


def _rank_file(name: str, args: Any) -> str:
    stem, suffix = name.split(".")
    return name if args.world_size == 1 else f"{stem}_{args.process_index}.{suffix}"


_ROLLOUT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "finished")
_SCORED = ("old_per_token_logps", "ref_per_token_logps", "values", "entropies", "scores", "valid")
_ADVANTAGES = ("mask", "token_rewards", "advantages", "returns")


def _experience_tensors(experience: Advantages) -> dict[str, torch.Tensor]:
    parts = ((experience.scored.rollout, _ROLLOUT), (experience.scored, _SCORED), (experience, _ADVANTAGES))
    return {name: getattr(part, name).contiguous().clone() for part, names in parts for name in names}


def _experience_facts(experience: Advantages) -> dict[str, str]:
    scored = experience.scored
    facts = {"index": scored.rollout.index, "finite": scored.finite, "cause": scored.cause}
    return {"facts": json.dumps(facts)}


def _load_experience(path: Path, device: torch.device) -> Advantages:
    """A saved rollout record. The dataset rows are not in it: the rewards have already seen them."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
    tensors = {name: tensor.to(device) for name, tensor in load_file(path).items()}
    rollout = Rollout(index=facts["index"], examples=[], **{name: tensors[name] for name in _ROLLOUT})
    scored = Scored(
        rollout=rollout, finite=facts["finite"], cause=facts["cause"], **{name: tensors[name] for name in _SCORED}
    )
    return Advantages(scored=scored, **{name: tensors[name] for name in _ADVANTAGES})
