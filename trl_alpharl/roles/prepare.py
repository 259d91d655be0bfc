"""Making models fit for PPO before anything runs: refusals, dropout, quantized layers."""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import nn

from .backbone import unwrap_peft


def refuse_unsupported(config: object, name: str) -> None:
    """Refuse model kinds that would train wrong, from the config alone, before weights load."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name}: encoder-decoder models are not supported; a decoder-only model is needed.")


def refuse_offloaded(model: nn.Module, name: str) -> None:
    """Refuse accelerate's cpu/disk dispatch: backward succeeds and leaves LoRA without gradients (measured)."""
    inner = unwrap_peft(model)
    places = set((getattr(inner, "hf_device_map", None) or {}).values())
    if places & {"cpu", "disk"} and places != {"cpu"}:
        raise ValueError(
            f"{name} is dispatched to {sorted(map(str, places))}: offloaded layers give adapters no gradients. "
            "Load it without a device_map, or quantized to fit."
        )
    if any(getattr(getattr(module, "_hf_hook", None), "offload", False) for module in inner.modules()):
        raise ValueError(f"{name} has offloaded layers, which give adapters no gradients; load it without offload.")


def is_quantized(model: nn.Module) -> bool:
    """True when a layer holds bitsandbytes 4-bit or 8-bit weights."""
    return any(type(module).__name__ in ("Linear4bit", "Linear8bitLt") for module in model.modules())


def keep_quantized_layers_trainable(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking NF4 weights on AVX512-BF16 CPUs.

    One no-gradient forward in eval mode repacks them in place; later training forwards take a kernel without autograd
    and the gradients are 60-100 % wrong, without an error (measured on bitsandbytes 0.50.2).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def disable_dropout(model: nn.Module) -> None:
    """Turn every dropout off, module or plain attribute: old and new log-probs must come from one function."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "layerdrop" in name) and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)


def freeze(model: nn.Module) -> nn.Module:
    """A model that only answers: eval mode, no gradients."""
    return model.requires_grad_(False).eval()


def require_adapters_only(model: PeftModel, adapters: list[str]) -> None:
    """Refuse a PEFT policy whose base weights are trainable: with adapters off it would not be the reference."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(f".{adapter}." in f"{name}." for adapter in adapters):
            raise ValueError(
                f"model: base parameter {name!r} is trainable beside the adapter, so the reference would drift; "
                "freeze it, or list its module in peft_config.modules_to_save."
            )


def first_bad_parameter(model: nn.Module, trainable_only: bool = False) -> str | None:
    """The name of the first parameter that holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        if parameter.dtype.is_floating_point and not torch.isfinite(parameter).all():
            return name
    return None
