"""Saving and loading the roles in the formats of transformers and peft."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel, TaskType, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from .actor_critic import ActorCritic
from .adapters import VALUE_ADAPTER
from .backbone import decoder_of, head_name, unwrap_peft

ADAPTER_FILE = "adapter_model.safetensors"
HEAD_FILE = "value_head.safetensors"
SCORE = "score.weight"


def save_policy(model: ActorCritic, folder: Path) -> None:
    """The policy: a plain peft adapter folder, or a plain transformers model folder."""
    if isinstance(model.policy, PeftModel):
        _save_adapter(model.policy, model.adapters["policy"], TaskType.CAUSAL_LM, folder)
    else:
        with _writable_generation_config(model.policy):
            model.policy.save_pretrained(folder)


@contextmanager
def _writable_generation_config(policy: Any) -> Iterator[None]:
    """transformers loads a generation config with a temperature but without do_sample, as Llama 2's, and then refuses
    to write it, which would end a run at its first checkpoint. It is written with do_sample."""
    own = policy.generation_config
    try:
        if own is not None:
            own.validate(strict=True)
    except ValueError:
        policy.generation_config = copy.deepcopy(own)
        policy.generation_config.do_sample = True
    try:
        yield
    finally:
        policy.generation_config = own


def load_policy(model: ActorCritic, folder: Path) -> None:
    """Load what `save_policy` wrote, without touching which parameters learn."""
    adapted, saved = isinstance(model.policy, PeftModel), (folder / ADAPTER_FILE).is_file()
    if adapted != saved:
        kinds = {True: "an adapter", False: "a whole model"}
        raise ValueError(f"{folder} holds {kinds[saved]}, but this run trains {kinds[adapted]} (peft_config).")
    if isinstance(model.policy, PeftModel):
        _load_adapter(model.policy, model.adapters["policy"], folder)
    else:
        _load_model(model.policy, folder)


def save_critic(model: ActorCritic, folder: Path) -> None:
    """The critic as a sequence classifier with one label: an adapter folder over the base model, or a model folder.

    A shared critic's folder repeats the trunk it shares, so that it loads by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.value_model is not None:
        if isinstance(model.value_model, PeftModel):
            _save_adapter(model.value_model, model.value_model.active_adapters[0], TaskType.SEQ_CLS, folder)
        else:
            model.value_model.save_pretrained(folder)
        return
    head = {f"score.{name}": tensor.detach().cpu().contiguous() for name, tensor in model.value_head.named_parameters()}
    save_file(head, folder / HEAD_FILE)
    score = head[SCORE]
    if isinstance(model.policy, PeftModel):
        adapter = model.adapters["critic"] or model.adapters["policy"]
        _save_adapter(model.policy, adapter, TaskType.SEQ_CLS, folder, score)
    else:
        _save_classifier(model.policy, score, folder)


def load_critic(model: ActorCritic, folder: Path) -> None:
    """Load what `save_critic` wrote."""
    if model.value_model is not None:
        if isinstance(model.value_model, PeftModel):
            _load_adapter(model.value_model, model.value_model.active_adapters[0], folder)
        else:
            _load_model(model.value_model, folder)
        return
    head = load_file(folder / HEAD_FILE)
    with torch.no_grad(), _one_line(folder / HEAD_FILE):
        for name, parameter in model.value_head.named_parameters():
            parameter.copy_(head[f"score.{name}"])
    if model.critic == "adapter":
        _load_adapter(model.policy, VALUE_ADAPTER, folder, drop=SCORE)


def _save_adapter(
    model: PeftModel, adapter: str, task: TaskType, folder: Path, score: torch.Tensor | None = None
) -> None:
    """One adapter in peft's format; with `score`, a language model's adapter as a sequence classifier's."""
    folder.mkdir(parents=True, exist_ok=True)
    # The hub is not asked whether the vocabulary was resized: embeddings that train are adapter weights already.
    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    config.task_type = task  # AutoPeftModel chooses the class by it; a script may have left it out
    if score is not None:
        head = head_name(model.get_base_model())
        state = {name: tensor for name, tensor in state.items() if not name.startswith(f"base_model.model.{head}.")}
        state[f"base_model.model.{SCORE}"] = score
        config.modules_to_save = sorted({*(config.modules_to_save or []), "score"} - {head})
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}  # tied copies apart
    save_file(state, folder / ADAPTER_FILE)
    config.save_pretrained(folder)


def _load_adapter(model: PeftModel, adapter: str, folder: Path, drop: str | None = None) -> None:
    """An adapter folder into an adapter of the same shape; `drop` is the end of a name that is not its."""
    state = load_file(folder / ADAPTER_FILE)
    if drop is not None:
        state = {name: tensor for name, tensor in state.items() if not name.endswith(drop)}
    own = {name for name, _ in model.named_parameters()}
    with _one_line(folder / ADAPTER_FILE):
        result = set_peft_model_state_dict(model, state, adapter_name=adapter)
    if result.unexpected_keys:
        raise ValueError(f"{folder / ADAPTER_FILE} does not fit the model: unexpected {result.unexpected_keys[0]!r}.")
    missing = [name for name in result.missing_keys if f".{adapter}." in f"{name}." and name in own]
    if missing:
        raise ValueError(f"{folder / ADAPTER_FILE} does not fit the model: {missing[0]!r} is missing.")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """torch and peft answer weights that do not fit with pages, or with a bare key."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} does not fit the model: {error} is missing.") from error
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error


def _save_classifier(policy: Any, score: torch.Tensor, folder: Path) -> None:
    """The trunk and the value head of a full-parameter policy as one classifier folder."""
    config = copy.deepcopy(policy.config)
    try:
        classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    except KeyError:
        return  # transformers has no classifier of this kind; the head is saved beside
    prefix = policy.base_model_prefix
    state = {f"{prefix}.{name}": tensor.detach().cpu() for name, tensor in decoder_of(policy).state_dict().items()}
    state[SCORE] = score.to(policy.dtype)
    config.num_labels = 1
    config.architectures = [classifier.__name__ if isinstance(classifier, type) else classifier[0].__name__]
    config.use_cache = True
    config.save_pretrained(folder)
    save_torch_state_dict(state, folder, metadata={"format": "pt"})


def _load_model(model: Any, folder: Path) -> None:
    """Weights of a model folder, in one file or several, into a model of the same kind."""
    inner = unwrap_peft(model)
    missing = set(inner.state_dict()) - set(getattr(inner, "all_tied_weights_keys", None) or {})
    saved: set[str] = set()
    files = sorted(folder.glob("model*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as weights:
            saved |= set(weights.keys())
    if saved <= set(inner.state_dict()):
        for file in files:
            with _one_line(file):
                inner.load_state_dict(load_file(file), strict=False)
    else:  # experts are saved in another layout than they run in; fp32 holds every dtype exactly
        loaded, info = type(inner).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if info["unexpected_keys"]:
            raise ValueError(f"{folder} does not fit the model: unexpected {min(info['unexpected_keys'])!r}.")
        inner.load_state_dict(loaded.state_dict())
        saved = missing - set(info["missing_keys"])
    if missing - saved:
        raise ValueError(f"{folder} does not fit the model: {min(missing - saved)!r} is missing.")
