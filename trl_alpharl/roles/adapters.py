"""Switching one PEFT model between roles, and the adapters that the roles need.

PEFT's own `set_adapter` and `disable_adapter` also set `requires_grad`: after one reference pass the critic's adapter
no longer learns, without an error. The switch here sets the two flags that a layer's forward reads, nothing else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel, PeftType
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from .backbone import head_name
from .prepare import require_trainable

REFERENCE_ADAPTER = "reference"
VALUE_ADAPTER = "critic"
_OURS = "_made_by_trl_alpharl"  # on the config of an adapter that a trainer added
LEAVES_BASE_WEIGHTS = ("gaussian", "orthogonal", "eva")  # named initializations; others may move weights of the base
UNSUPPORTED = {
    "target_parameters": "LoRA on expert parameters",
    "alora_invocation_tokens": "its effect depends on where the invocation tokens are",
    "arrow_config": "it routes over other adapters",
    "monteclora_config": "it samples weights, and old and new log-probs must come from one function",
}


class RoleSwitch:
    """Makes one adapter of a PEFT model active, or none, without touching `requires_grad`.

    `use(None)` turns all adapters off. On a model without PEFT every call is a no-op. The layers are looked up once;
    call `refresh` after adding an adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.current: str | None = None
        self.refresh()

    def refresh(self) -> None:
        """Look the adapter layers up again."""
        self._layers = []
        for module in self._model.modules():
            if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                continue
            for flag in ("_active_adapter", "_disable_adapters"):
                if not hasattr(module, flag):
                    raise AttributeError(f"PEFT's {type(module).__name__} has no `{flag}`; this PEFT is not supported.")
            self._layers.append((module, module._get_available_adapters()))

    def use(self, adapter: str | None) -> None:
        """Activate `adapter`, or none of them."""
        for layer, available in self._layers:
            layer._disable_adapters = adapter is None
            if adapter is None:
                continue
            if adapter not in available:  # a layer that this adapter does not touch answers with its base weights
                layer._active_adapter = []
            else:  # each in the form that PEFT's own set_adapter leaves behind
                layer._active_adapter = adapter if isinstance(layer, AuxiliaryTrainingWrapper) else [adapter]
        self.current = adapter

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Activate `adapter` inside the block and what was active before it afterwards."""
        before = self.current
        self.use(adapter)
        try:
            yield
        finally:
            self.use(before)

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """`context_fn` for `torch.utils.checkpoint`: the recompute runs in the role of the forward.

        Without it, a switch between forward and backward makes the recompute use another adapter; gradients were
        measured off by up to 2.5 times, without an error.
        """
        return self.using(self.current), self.using(self.current)


def policy_adapter(model: PeftModel, name: str | None) -> str:
    """The adapter that is the policy: `name`, or the active one."""
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        raise ValueError("model has a merged adapter; call `unmerge_adapter()` first, or merge it for good.")
    if name is not None:
        _require_adapter(model, name, "model_adapter_name")
        return name
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"model has {len(active)} active adapters {active}; name the policy's in model_adapter_name.")
    return active[0]


def require_lora(model: PeftModel, adapter: str) -> None:
    """Refuse adapters that cannot be switched by flags, or off exactly, one line each."""
    config = model.peft_config[adapter]
    # AdaLoRA lets one adapter learn and drops ranks by steps that nobody here takes.
    if config.is_prompt_learning or config.is_adaption_prompt or config.peft_type == PeftType.ADALORA:
        raise ValueError(f"peft_config: {config.peft_type} is not supported; use a LoRA-type adapter.")
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"peft_config.bias is {config.bias!r}: it trains the base model's biases, so the reference would drift; "
            "use bias='none'."
        )
    for field, what in UNSUPPORTED.items():
        if getattr(config, field, None):
            raise ValueError(f"peft_config.{field} ({what}) is not supported.")
    if any(adapter in dict(module.named_children()) for module in _all_but_dicts(model)):
        raise ValueError(f"model's adapter {adapter!r} is named like one of the model's own modules; rename it.")


def reference_adapter(model: PeftModel, policy: str, name: str | None) -> str | None:
    """The adapter that is the reference: `name`; none (adapters off) while the policy's adapter changes nothing; else
    a frozen copy of the policy's adapter, made here."""
    if name is not None:
        _require_adapter(model, name, "ref_adapter_name")
        if name == policy:
            raise ValueError(f"ref_adapter_name is {name!r}, the policy itself; it needs an adapter of its own.")
        require_lora(model, name)
        _freeze(model, name)
        return name
    if changes_nothing(model, policy):
        return None
    _add_adapter(model, REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[policy]))
    left_out = _copy_adapter(model, policy, REFERENCE_ADAPTER)
    if left_out:
        raise ValueError(
            f"model's adapter {policy!r} comes trained and cannot be copied as the reference: peft gives a second "
            f"adapter no {left_out[0]!r} (weight tying); pass ref_model."
        )
    _freeze(model, REFERENCE_ADAPTER)
    return REFERENCE_ADAPTER


def add_value_adapter(model: PeftModel, policy: str) -> str:
    """An adapter for the critic, shaped like the policy's. It starts as the identity; where the policy's
    initialization moved a part of the base weights into the adapter, as a copy of the policy's."""
    config = copy.deepcopy(model.peft_config[policy])
    config.modules_to_save = None
    config.inference_mode = False
    head = model.get_base_model().get_output_embeddings()
    if isinstance(head, BaseTunerLayer) and policy in head._get_available_adapters():
        _exclude(config, head_name(model.get_base_model()))  # values do not pass through it
    if getattr(config, "ensure_weight_tying", False):  # so there is nothing to tie
        config.ensure_weight_tying = False
        config.modules_to_tie = config.target_modules_to_tie = None
    _add_adapter(model, VALUE_ADAPTER, config)
    initialization = getattr(model.peft_config[policy], "init_lora_weights", True)
    if isinstance(initialization, str) and initialization not in LEAVES_BASE_WEIGHTS:
        _copy_adapter(model, policy, VALUE_ADAPTER)
        config.init_lora_weights = initialization  # whoever loads the saved critic must prepare its base alike
    return VALUE_ADAPTER


def changes_nothing(model: PeftModel, adapter: str) -> bool:
    """True when the model with this adapter equals the model without: a LoRA factor is zero, copies equal their
    originals. False also means "not known": other adapter types."""
    if model.peft_config[adapter].peft_type != "LORA":
        return False
    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            if adapter in module.token_indices and not _equal_tokens(module, adapter):
                return False
        elif isinstance(module, BaseTunerLayer):
            for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
                factors = [getattr(module, table, {}) for table in (first, second)]
                if all(adapter in table and _any_weight(table[adapter]) for table in factors):
                    return False
        elif isinstance(module, ModulesToSaveWrapper) and not _equal_copy(module, adapter):
            return False
    return True


def set_trainable(model: PeftModel, adapters: list[str]) -> None:
    """Let these adapters learn and freeze everything else."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for adapter in adapters:
        for _, parameter in adapter_parameters(model, adapter):
            parameter.requires_grad_(True)


def let_critic_learn(value_model: nn.Module) -> None:
    """Unfreeze the adapter of a critic that came frozen, as peft loads them; refuse one in which nothing learns."""
    if isinstance(value_model, PeftModel) and not any(p.requires_grad for p in value_model.parameters()):
        set_trainable(value_model, [policy_adapter(value_model, None)])
    require_trainable(value_model, "value_model")


def adapter_parameters(model: PeftModel, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that belong to one adapter."""
    for name, parameter in model.named_parameters():
        if f".{adapter}." in f"{name}.":
            yield f"{name}.", parameter


def _add_adapter(model: PeftModel, name: str, config: Any) -> None:
    """Add an adapter that starts as the identity, without touching what the others learn or the base weights."""
    if getattr(model.peft_config.get(name), _OURS, False):
        model.delete_adapter(name)  # of an earlier trainer of this model, as when a notebook's cell runs again
    if name in model.peft_config:
        raise ValueError(f"model already has an adapter named {name!r}, the name this trainer needs; rename yours.")
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # pissa, olora and the like would move base weights that the policy runs on
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    setattr(config, _OURS, True)
    model.add_adapter(name, config)
    for parameter in trainable:  # add_adapter re-activates the old adapter, which may freeze or unfreeze others
        parameter.requires_grad_(True)


def _exclude(config: Any, module: str) -> None:
    excluded = config.exclude_modules
    if isinstance(excluded, str):  # a pattern
        config.exclude_modules = f"(?:{excluded})|(?:.*\\.)?{re.escape(module)}"
    else:
        config.exclude_modules = [*(excluded or []), module]


@torch.no_grad()
def _copy_adapter(model: PeftModel, source: str, target: str) -> list[str]:
    """Give `target` the weights of `source`. Returns the names of what `target` has no place for."""
    weights = {name.replace(f".{source}.", f".{target}."): p for name, p in adapter_parameters(model, source)}
    for name, parameter in adapter_parameters(model, target):
        parameter.copy_(weights.pop(name))
    return [name.strip(".") for name in weights]


def _all_but_dicts(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose children are named by the model's author, not by an adapter."""
    return (module for module in model.modules() if not isinstance(module, nn.ModuleDict))


def _freeze(model: PeftModel, adapter: str) -> None:
    for _, parameter in adapter_parameters(model, adapter):
        parameter.requires_grad_(False)


def _equal_copy(wrapper: ModulesToSaveWrapper, adapter: str) -> bool:
    if adapter not in wrapper.modules_to_save:
        return True
    pairs = zip(wrapper.modules_to_save[adapter].parameters(), wrapper.original_module.parameters())
    return all(torch.equal(first, second) for first, second in pairs)


def _equal_tokens(layer: TrainableTokensLayer, adapter: str) -> bool:
    rows = layer.base_layer.weight[layer.token_indices[adapter]]
    return torch.equal(layer.trainable_tokens_delta[adapter], rows)


def _any_weight(factor: nn.Module | nn.Parameter) -> bool:
    parameters = factor.parameters() if isinstance(factor, nn.Module) else [factor]
    return any(bool(parameter.any()) for parameter in parameters)


def _require_adapter(model: PeftModel, name: str, field: str) -> None:
    if name not in model.peft_config:
        raise ValueError(f"{field} is {name!r}, but the model's adapters are {list(model.peft_config)}.")
