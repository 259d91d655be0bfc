"""Saving and loading the roles in the formats of transformers and peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel, TaskType, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from .actor_critic import ActorCritic
from .adapters import VALUE_ADAPTER
from .backbone import decoder_of, unwrap_peft

ADAPTER_FILE = "adapter_model.safetensors"
HEAD_FILE = "value_head.safetensors"
SCORE = "score.weight"


def save_policy(model: ActorCritic, folder: Path) -> None:
    """The policy: a plain peft adapter folder, or a plain transformers model folder."""
    if isinstance(model.policy, PeftModel):
        _save_adapter(model.policy, model.adapters["policy"], folder)
    else:
        model.policy.save_pretrained(folder)


def load_policy(model: ActorCritic, folder: Path) -> None:
    """Load what `save_policy` wrote, without touching which parameters learn."""
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
        model.value_model.save_pretrained(folder)
        return
    score = model.value_head.weight.detach().cpu()
    save_file({SCORE: score.contiguous()}, folder / HEAD_FILE)
    if isinstance(model.policy, PeftModel):
        adapter = model.adapters["critic"] or model.adapters["policy"]
        _save_adapter(model.policy, adapter, folder, {f"base_model.model.{SCORE}": score})
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
    with torch.no_grad():
        model.value_head.weight.copy_(load_file(folder / HEAD_FILE)[SCORE])
    if model.critic == "adapter":
        _load_adapter(model.policy, VALUE_ADAPTER, folder)


def _save_adapter(model: PeftModel, adapter: str, folder: Path, score: dict[str, torch.Tensor] | None = None) -> None:
    """One adapter in peft's format; with `score`, as a sequence classifier's adapter that carries its head."""
    folder.mkdir(parents=True, exist_ok=True)
    # The hub is not asked whether the vocabulary was resized: embeddings that train are adapter weights already.
    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    if score is not None:
        head = [name for name in state if ".lm_head." in name or ".embed_out." in name]
        state = {name: tensor for name, tensor in state.items() if name not in head} | score
        config.task_type = TaskType.SEQ_CLS
        config.modules_to_save = sorted({*(config.modules_to_save or []), "score"} - {"lm_head", "embed_out"})
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / ADAPTER_FILE)
    config.save_pretrained(folder)


def _load_adapter(model: PeftModel, adapter: str, folder: Path) -> None:
    state = load_file(folder / ADAPTER_FILE)
    if adapter == VALUE_ADAPTER:
        state = {name: tensor for name, tensor in state.items() if not name.endswith(SCORE)}
    own = {name for name, _ in model.named_parameters()}
    result = set_peft_model_state_dict(model, state, adapter_name=adapter)
    if result.unexpected_keys:
        raise ValueError(f"{folder / ADAPTER_FILE} does not fit the model: unexpected {result.unexpected_keys[0]!r}.")
    missing = [name for name in result.missing_keys if f".{adapter}." in f"{name}." and name in own]
    if missing:
        raise ValueError(f"{folder / ADAPTER_FILE} does not fit the model: {missing[0]!r} is missing.")


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
    """Weights of a model folder, sharded or not, into a model of the same kind."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    inner = unwrap_peft(model)
    missing = set(inner.state_dict())
    for name in names:
        state = load_file(folder / name)
        result = inner.load_state_dict(state, strict=False)
        if result.unexpected_keys:
            raise ValueError(f"{folder / name} does not fit the model: unexpected {result.unexpected_keys[0]!r}.")
        missing -= set(state)
    missing -= set(getattr(inner, "all_tied_weights_keys", None) or {})
    if missing:
        raise ValueError(f"{folder} does not fit the model: {sorted(missing)[0]!r} is missing.")
