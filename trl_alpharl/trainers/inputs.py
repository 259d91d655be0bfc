"""Turning what users pass (names, models, callables) into what the trainer holds. Each check is one line, early."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from ..rewards import get_reward
from ..rewards.model import RewardModel, load_reward_model
from ..roles.backbone import unwrap_peft
from ..roles.prepare import is_quantized, refuse_unsupported


def load_tokenizer(processing_class: Any, model: Any) -> PreTrainedTokenizerBase:
    """The tokenizer, loaded by the model's name when none was passed. Image processors are refused."""
    if processing_class is None:
        name = model if isinstance(model, str) else getattr(unwrap_peft(model).config, "_name_or_path", "")
        if not name:
            raise ValueError("processing_class is missing, and the model has no name to load a tokenizer by.")
        processing_class = AutoTokenizer.from_pretrained(tokenizer_source(name))
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}; a tokenizer is needed "
            "(processors with images are not supported yet)."
        )
    return processing_class


def load_policy(
    model: Any, init_kwargs: dict[str, Any] | None, peft_config: PeftConfig | None, top_layers: int | None = None
) -> nn.Module:
    """The policy: a model, or the name of one; wrapped in a fresh adapter when `peft_config` is given, on its last
    `top_layers` decoder layers alone when that is."""
    if isinstance(model, str):
        if peft_config is not None and is_adapter_folder(model):
            raise ValueError(f"model: {model} is a saved adapter; pass it without peft_config, or name its base model.")
        init_kwargs = dict(init_kwargs or {})
        if "torch_dtype" in init_kwargs:  # the older name; from_pretrained would prefer our default to it
            init_kwargs.setdefault("dtype", init_kwargs.pop("torch_dtype"))
        model = load_causal_lm(model, "model", **{"dtype": "float32", **init_kwargs})
    elif init_kwargs:
        raise ValueError("model_init_kwargs is set, but model is already loaded; pass its name instead.")
    refuse_unsupported(_transformers_model(model, "model", "a transformers model or its name").config, "model")
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())  # refused for that, later
    if not offloaded and all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model has no weights (they are on the meta device); load it with from_pretrained.")
    if peft_config is None:
        return model
    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"peft_config is a {type(peft_config).__name__}; a peft.PeftConfig such as LoraConfig is needed."
        )
    if isinstance(model, PeftModel):
        raise ValueError("model is a PeftModel already; pass it without peft_config, or pass its base model.")
    if top_layers is not None:
        number = model.config.get_text_config().num_hidden_layers
        if top_layers > number:
            raise ValueError(f"lora_top_layers is {top_layers}; model has {number} layers.")
        peft_config = copy.deepcopy(peft_config)
        peft_config.layers_to_transform = list(range(number - top_layers, number))
    return get_peft_model(model, peft_config)


def check_top_layers(top_layers: int | None, peft_config: Any) -> None:
    """Refuse `lora_top_layers` without a fresh adapter to put there, or with one that says itself where it goes."""
    if top_layers is None:
        return
    if peft_config is None:
        raise ValueError("lora_top_layers is set, but there is no fresh adapter; pass peft_config (use_peft).")
    if getattr(peft_config, "layers_to_transform", None) is not None:
        raise ValueError("lora_top_layers and peft_config.layers_to_transform are both set; leave one of them out.")
    if isinstance(peft_config, PeftConfig) and not hasattr(peft_config, "layers_to_transform"):
        raise ValueError(f"lora_top_layers: a {type(peft_config).__name__} goes on all layers; use a LoraConfig.")
    names = getattr(peft_config, "target_modules", None) or ()
    pattern = isinstance(names, str) and names != "all-linear"
    if pattern or any(part.isdigit() for name in names for part in name.split(".")):  # peft heeds these alone
        raise ValueError(
            "lora_top_layers and layers in peft_config.target_modules are both set; list names of modules such as "
            "'q_proj' there, no pattern and no numbers."
        )


def load_causal_lm(name: str, field: str, **kwargs: Any) -> nn.Module:
    """A causal language model by its name. A saved adapter's folder gives its base model with the adapter, which learns
    on. `kwargs` go to from_pretrained; `field` names the model in an error."""
    if not is_adapter_folder(name):
        where = {key: kwargs[key] for key in ("revision", "subfolder", "token", "cache_dir") if key in kwargs}
        refuse_unsupported(AutoConfig.from_pretrained(name, **where), field)
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    if not PeftConfig.from_pretrained(name).base_model_name_or_path:
        raise ValueError(
            f"{field}: the adapter in {name} names no base model; pass a PeftModel, loaded with is_trainable=True."
        )
    return AutoPeftModelForCausalLM.from_pretrained(name, is_trainable=True, **kwargs)


def is_adapter_folder(name: str) -> bool:
    """True for a local folder that holds a PEFT adapter in place of a whole model."""
    return (Path(name) / "adapter_config.json").is_file()


def tokenizer_source(name: str) -> str:
    """Where a model's tokenizer lies: with it, or with the base model of an adapter that was saved without one."""
    if is_adapter_folder(name) and not (Path(name) / "tokenizer_config.json").is_file():
        return PeftConfig.from_pretrained(name).base_model_name_or_path or name
    return name


def check_roles(model: Any, ref_model: Any, value_model: Any, critic: str, peft_config: Any) -> None:
    """Refuse, before weights load, a reference that cannot be one and a critic that the policy leaves no place for."""
    if ref_model is not None and not isinstance(ref_model, nn.Module):
        raise TypeError(f"ref_model is a {type(ref_model).__name__}; a loaded model is needed, or None for the policy.")
    if ref_model is not None and ref_model is model:
        raise ValueError("ref_model is the same object as model; pass a copy, or None to let the trainer make one.")
    if value_model is not None and value_model is model:
        raise ValueError("value_model is the same object as model; pass a sequence classifier, or None for a head.")
    adapted = peft_config is not None or isinstance(model, PeftModel)
    if isinstance(model, str):
        adapted |= is_adapter_folder(model)
    if critic == "adapter" and value_model is None and not adapted:
        raise ValueError(
            "critic='adapter' needs a LoRA policy; pass peft_config (use_peft in a recipe), or use critic='shared'."
        )


def _transformers_model(model: Any, name: str, needed: str) -> PreTrainedModel:
    inner = unwrap_peft(model) if isinstance(model, nn.Module) else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"{name} is a {type(inner).__name__}; {needed} is needed.")
    return inner


def prepare_value_model(value_model: nn.Module | None, policy: nn.Module, num_tokens: int) -> nn.Module | None:
    """A critic with its own weights. A quantized one without an adapter gets one: its packed weights cannot train."""
    if value_model is None:
        return None
    inner = _transformers_model(value_model, "value_model", "a sequence classification model")
    refuse_unsupported(inner.config, "value_model")
    if getattr(inner.config, "num_labels", 1) != 1:
        raise ValueError(f"value_model has num_labels={inner.config.num_labels}; a critic needs num_labels=1.")
    rows = inner.get_input_embeddings().weight.shape[0]
    needed = min(num_tokens, policy.get_input_embeddings().weight.shape[0])  # a tokenizer may know tokens of no model
    if rows < needed:
        raise ValueError(f"value_model embeds {rows} tokens, fewer than the {needed} of the policy.")
    if is_quantized(value_model) and not isinstance(value_model, PeftModel):
        if not isinstance(policy, PeftModel):
            raise ValueError("value_model is quantized; wrap it with get_peft_model, its packed weights cannot train.")
        config = copy.deepcopy(policy.peft_config[policy.active_adapters[0]])
        config.task_type, config.modules_to_save = TaskType.SEQ_CLS, ["score"]
        return get_peft_model(value_model, config)
    return value_model


def list_rewards(reward_funcs: Any, reward_model: Any, weights: Sequence[float] | None = None) -> list[Any]:
    """Every reward in order, callables and models; `reward_model` (TRL 1.12's) comes first. Names are looked up and
    weights counted: it needs no policy, so that a mistake here costs no loading of one."""
    if reward_funcs is None:
        reward_funcs = []
    elif not isinstance(reward_funcs, (list, tuple)):
        reward_funcs = [reward_funcs]
    rewards = ([] if reward_model is None else [reward_model]) + list(reward_funcs)
    if not rewards:
        raise ValueError(
            "no reward: pass reward_funcs (a function, a name, a model or a list of them) or reward_model."
        )
    for reward in rewards:
        if not callable(reward) and not isinstance(reward, str):
            raise TypeError(f"a reward must be a callable, a name or a model, found {type(reward).__name__}.")
        if isinstance(reward, nn.Module):
            needed = "a transformers model, or a function (completions, **kwargs) -> list of numbers that calls yours,"
            _transformers_model(reward, "reward_model", needed)
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"reward_weights has {len(weights)} entries for {len(rewards)} reward functions.")
    return [_reward_by_name(reward) if isinstance(reward, str) else reward for reward in rewards]


def resolve_rewards(
    reward_funcs: Any, reward_model: Any, processing_classes: Any, tokenizer: Any, policy: Any
) -> list[Callable]:
    """`list_rewards` as callables with TRL's signature: a model is wrapped with its tokenizer."""
    rewards = list_rewards(reward_funcs, reward_model)
    if not isinstance(processing_classes, (list, tuple)):
        processing_classes = [processing_classes] * len(rewards)
    if len(processing_classes) != len(rewards):
        raise ValueError(f"reward_processing_classes has {len(processing_classes)} entries for {len(rewards)} rewards.")
    return [_resolve_reward(reward, cls, tokenizer, policy) for reward, cls in zip(rewards, processing_classes)]


def _resolve_reward(reward: Any, processing_class: Any, tokenizer: Any, policy: Any) -> Callable:
    if not isinstance(reward, nn.Module):
        return reward
    if processing_class is None:
        processing_class = _reward_tokenizer(reward, tokenizer, policy)
    return RewardModel(reward, processing_class)


def _reward_by_name(name: str) -> Callable:
    unknown = ""
    try:
        try:
            return get_reward(name)
        except ValueError as error:  # the hub id of a classifier may lack the slash that tells it
            unknown = f"{error} "
            return load_reward_model(name)
    except OSError as error:
        raise ValueError(f"{unknown}{name!r} is no model that loads: {str(error).splitlines()[0]}") from error


def _reward_tokenizer(reward_model: Any, tokenizer: Any, policy: Any) -> Any:
    """The reward model's own tokenizer, by its name; without one the policy's, if the vocabularies have one size."""
    config = unwrap_peft(reward_model).config
    name = getattr(config, "_name_or_path", "")
    policy_config = unwrap_peft(policy).config
    same_vocabulary = config.get_text_config().vocab_size == policy_config.get_text_config().vocab_size
    if name and name != getattr(policy_config, "_name_or_path", ""):
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            if not same_vocabulary:
                raise ValueError(
                    f"the reward model {name!r} has no tokenizer that loads; pass it in reward_processing_classes."
                ) from error
            warnings.warn(
                f"the reward model {name!r} has no tokenizer of its own; it gets the policy's, as in TRL 1.12. "
                "Pass another in reward_processing_classes.",
                stacklevel=2,
            )
    if not same_vocabulary:
        raise ValueError(
            "the reward model's vocabulary differs from the policy's; pass its tokenizer in reward_processing_classes."
        )
    return tokenizer


def require_dataset(dataset: Any, name: str) -> None:
    """Raise one line unless `dataset` is a map-style dataset with rows."""
    if dataset is None:
        raise ValueError(f"{name} is required: rows with `prompt` or `input_ids`.")
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset))
        raise TypeError(f"{name} is a {type(dataset).__name__} with {splits}; pass one of them.")
    if isinstance(dataset, str):
        raise TypeError(f"{name} is the text {dataset!r}; pass the dataset itself, from datasets.load_dataset.")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{name} is a {type(dataset).__name__} without a length; streamed datasets are not supported.")
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows.")
    try:
        row = dataset[0]
    except LookupError:
        raise TypeError(
            f"{name} is a {type(dataset).__name__} whose first row is not {name}[0]; pass a datasets.Dataset or a list."
        ) from None
    if not isinstance(row, Mapping):
        raise TypeError(f"{name} holds rows of type {type(row).__name__}; a row is a dict with `prompt`.")


def check_datasets(prompts: Any, train_dataset: Any, eval_dataset: Any = None) -> None:
    """Check the first row of every dataset, and every row of a text column."""
    named = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        if not eval_dataset:
            raise ValueError("eval_dataset is an empty dict; pass None for no evaluation.")
        named |= {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    elif eval_dataset is not None:
        named["eval_dataset"] = eval_dataset
    for name, dataset in named.items():
        check_dataset(prompts, dataset, name)


def check_dataset(prompts: Any, dataset: Any, name: str) -> None:
    """Raise one line unless the rows of one dataset can be read."""
    require_dataset(dataset, name)
    row = dict(dataset[0])
    _check_prompt(row, name)
    prompts.check(row, name)
    if "input_ids" in row or not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    if getattr(dataset.features["prompt"], "dtype", "") == "string":  # a bad row would end the run in its middle
        chunks = dataset.data.column("prompt").chunks  # ten times as fast as rows; it holds those left out, too
        if all(all(chunk.to_pylist()) for chunk in chunks):
            return
        allowed = ("",) if prompts.tokenizer("")["input_ids"] else ()
        for number, prompt in enumerate(dataset.with_format(None)["prompt"]):
            if not prompt and prompt not in allowed:
                raise ValueError(f"{name}.prompt is {prompt!r} in row {number}; filter such rows out.")


def _check_prompt(row: dict[str, Any], name: str) -> None:
    if "prompt" not in row or "input_ids" in row:
        return
    prompt = row["prompt"]
    chat = isinstance(prompt, list) and prompt and all(isinstance(turn, Mapping) and "role" in turn for turn in prompt)
    if not chat and not isinstance(prompt, str):
        raise TypeError(
            f"{name}.prompt is {str(prompt)[:80]!r} ({type(prompt).__name__}); it must be text or chat turns, "
            "dicts with `role` and `content`."
        )


def callback_list(callbacks: Any) -> list[Any]:
    """The callbacks that a script passed: none, one or a list, each an object or a class."""
    if callbacks is None:
        return []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise TypeError(f"callbacks holds a {kind.__name__}; a transformers.TrainerCallback is needed.")
    return callbacks


def check_optimizer(optimizer: Any, actor_critic: Any, critic_learning_rate: float | None) -> None:
    """Let an optimizer that a script passed know the value head, which is made after it.

    Raises ValueError for an optimizer that does not train the policy: one made before `peft_config` wrapped the model.
    """
    if optimizer is None:
        return
    if critic_learning_rate is not None:
        raise ValueError("critic_learning_rate is set, but optimizers is passed; set the rate in its parameter groups.")
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    critic = actor_critic.critic_parameters()
    learning = {id(parameter) for parameter in actor_critic.parameters() if parameter.requires_grad}
    if not known & (learning - {id(parameter) for parameter in critic}):
        raise ValueError(
            "optimizers: the optimizer holds no parameter that the policy trains; wrap the model with get_peft_model "
            "first and build it from the parameters that require gradients."
        )
    # Into a group that is there: a scheduler that was passed counts the groups.
    optimizer.param_groups[0]["params"] += [parameter for parameter in critic if id(parameter) not in known]


def split_critic_groups(optimizer: Any, critic: list[nn.Parameter], learning_rate: float) -> None:
    """Move the critic's own parameters into groups with their own learning rate."""
    own = {id(parameter) for parameter in critic}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in own]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
            rest = {name: value for name, value in group.items() if name != "params"}
            optimizer.add_param_group({**rest, "params": moved, "lr": learning_rate, "initial_lr": learning_rate})
