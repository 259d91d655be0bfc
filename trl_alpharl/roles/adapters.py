"""Switching one PEFT model between roles, and the adapters that the roles need.

PEFT's own `set_adapter` and `disable_adapter` also set `requires_grad`: after one reference pass the critic's adapter
no longer learns, without an error. The switch here sets the two flags that a layer's forward reads, nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

REFERENCE_ADAPTER = "reference"
VALUE_ADAPTER = "critic"


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
        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        self._layers = [module for module in self._model.modules() if isinstance(module, kinds)]
        for layer in self._layers:
            for flag in ("_active_adapter", "_disable_adapters"):
                if not hasattr(layer, flag):
                    raise AttributeError(f"PEFT's {type(layer).__name__} has no `{flag}`; this PEFT is not supported.")
            if getattr(layer, "merged_adapters", None):
                raise ValueError("model has a merged adapter; call `unmerge_adapter()` first, or merge it for good.")

    def use(self, adapter: str | None) -> None:
        """Activate `adapter`, or none of them."""
        for layer in self._layers:
            layer._disable_adapters = adapter is None
            if adapter is not None:
                wrapped = isinstance(layer, AuxiliaryTrainingWrapper) and adapter not in layer._adapters
                layer._active_adapter = [] if wrapped else [adapter]
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
    if name is not None:
        _require_adapter(model, name, "model_adapter_name")
        return name
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"model has {len(active)} active adapters {active}; name the policy's in model_adapter_name.")
    return active[0]


def require_lora(model: PeftModel, adapter: str) -> None:
    """Refuse adapter kinds that cannot be switched off exactly, one line each."""
    config = model.peft_config[adapter]
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(f"peft_config: {config.peft_type} is not supported; use a LoRA-type adapter.")
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"peft_config.bias is {config.bias!r}: it trains the base model's biases, so the reference would drift; "
            "use bias='none'."
        )
    if getattr(config, "target_parameters", None):
        raise ValueError("peft_config.target_parameters (LoRA on expert parameters) is not supported yet.")


def reference_adapter(model: PeftModel, policy: str, name: str | None) -> str | None:
    """The adapter that is the reference: `name`; none (adapters off) while the policy's adapter changes nothing; else
    a frozen copy of the policy's adapter, made here."""
    if name is not None:
        _require_adapter(model, name, "ref_adapter_name")
        if name == policy:
            raise ValueError(f"ref_adapter_name is {name!r}, the policy itself; it needs an adapter of its own.")
        _freeze(model, name)
        return name
    if changes_nothing(model, policy):
        return None
    _require_free(model, REFERENCE_ADAPTER)
    _add_adapter(model, REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[policy]))
    copied = {name.replace(f".{policy}.", f".{REFERENCE_ADAPTER}."): p for name, p in adapter_parameters(model, policy)}
    with torch.no_grad():
        for parameter_name, parameter in adapter_parameters(model, REFERENCE_ADAPTER):
            parameter.copy_(copied[parameter_name])
    _freeze(model, REFERENCE_ADAPTER)
    return REFERENCE_ADAPTER


def add_value_adapter(model: PeftModel, policy: str) -> str:
    """A fresh adapter for the critic, shaped like the policy's; it starts as the identity."""
    _require_free(model, VALUE_ADAPTER)
    config = copy.deepcopy(model.peft_config[policy])
    config.modules_to_save = None
    config.inference_mode = False
    if not isinstance(getattr(config, "init_lora_weights", True), bool):
        config.init_lora_weights = True  # pissa and the like would change the shared base weights a second time
    _add_adapter(model, VALUE_ADAPTER, config)
    return VALUE_ADAPTER


def changes_nothing(model: PeftModel, adapter: str) -> bool:
    """True when the model with this adapter equals the model without: LoRA B is zero, copies equal their originals."""
    config = model.peft_config[adapter]
    if config.peft_type != "LORA" or not isinstance(getattr(config, "init_lora_weights", True), bool):
        return False
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and adapter in module._adapters:
            copies = getattr(module, "modules_to_save", None)
            if copies is None or not _equal_parameters(copies[adapter], module.original_module):
                return False
        elif isinstance(module, BaseTunerLayer):
            for table in ("lora_B", "lora_embedding_B"):
                entries = getattr(module, table, {})
                if adapter in entries:
                    entry = entries[adapter]
                    weight = entry.weight if isinstance(entry, nn.Module) else entry
                    if weight.any():
                        return False
    return True


def set_trainable(model: PeftModel, adapters: list[str]) -> None:
    """Let these adapters learn and freeze everything else."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for adapter in adapters:
        for _, parameter in adapter_parameters(model, adapter):
            parameter.requires_grad_(True)


def adapter_parameters(model: PeftModel, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that belong to one adapter."""
    for name, parameter in model.named_parameters():
        if f".{adapter}." in f"{name}.":
            yield f"{name}.", parameter


def _add_adapter(model: PeftModel, name: str, config: Any) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.add_adapter(name, config)
    for parameter in trainable:  # add_adapter re-activates the old adapter, which may freeze or unfreeze others
        parameter.requires_grad_(True)


def _freeze(model: PeftModel, adapter: str) -> None:
    for _, parameter in adapter_parameters(model, adapter):
        parameter.requires_grad_(False)


def _equal_parameters(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def _require_adapter(model: PeftModel, name: str, field: str) -> None:
    if name not in model.peft_config:
        raise ValueError(f"{field} is {name!r}, but the model's adapters are {list(model.peft_config)}.")


def _require_free(model: PeftModel, name: str) -> None:
    if name in model.peft_config:
        raise ValueError(f"model already has an adapter named {name!r}, the name this trainer needs; rename yours.")
