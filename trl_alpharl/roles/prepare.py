"""Making models fit for PPO before anything runs: refusals, dropout, quantized layers."""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import nn
from transformers.utils import logging

from .backbone import unwrap_peft

logger = logging.get_logger(__name__)


def refuse_unsupported(config: object, name: str) -> None:
    """Refuse model kinds that would train wrong, from the config alone, before weights load."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name}: encoder-decoder models are not supported; a decoder-only model is needed.")


def refuse_offloaded(model: nn.Module, name: str) -> None:
    """Refuse accelerate's cpu/disk dispatch: backward succeeds and leaves LoRA without gradients (measured)."""
    places = set((getattr(unwrap_peft(model), "hf_device_map", None) or {}).values())
    if places & {"cpu", "disk"} and places != {"cpu"}:
        raise ValueError(
            f"{name} is dispatched to {sorted(map(str, places))}: offloaded layers give adapters no gradients. "
            "Load it without a device_map, or quantized to fit."
        )
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise ValueError(f"{name} has offloaded layers, which give adapters no gradients; load it without offload.")


def refuse_shared_weights(model: nn.Module, others: dict[str, nn.Module | None], name: str) -> None:
    """Refuse a model that will be frozen while another role trains on the same parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    for other_name, other in others.items():
        if other is not None and any(id(parameter) in own for parameter in other.parameters()):
            raise ValueError(
                f"{name} shares weights with {other_name}: freezing one would freeze the other. Pass a copy."
            )


def require_trainable(model: nn.Module, name: str) -> None:
    """Refuse a model without adapter in which nothing learns."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{name} has no trainable parameter; call requires_grad_(True) on what should learn.")


def is_quantized(model: nn.Module) -> bool:
    """True when layers hold packed weights: bitsandbytes, or what else transformers loads quantized."""
    kinds = ("Linear4bit", "Linear8bitLt")
    return getattr(unwrap_peft(model), "is_quantized", False) or any(
        type(module).__name__ in kinds for module in model.modules()
    )


def keep_quantized_layers_trainable(model: nn.Module, name: str) -> None:
    """Stop bitsandbytes from repacking NF4 weights on AVX512-BF16 CPUs; refuse weights that it has repacked.

    One no-gradient forward in eval mode repacks them in place; later training forwards take a kernel without autograd
    and the gradients are 60-100 % wrong, without an error (measured on bitsandbytes 0.50.2, whose way back loses the
    order of the block scales).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"{name} has run in eval mode on this CPU, which repacked its 4-bit weights for inference alone; "
                    "load it again and pass it before it runs."
                )


def disable_dropout(model: nn.Module) -> None:
    """Turn off every dropout and router jitter, module or attribute: old and new log-probs must come from one
    function."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            noisy = any(word in name for word in ("dropout", "layerdrop", "jitter"))
            if noisy and isinstance(value, float) and value > 0:
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


def check_positions(model: nn.Module, prompt_tokens: int, response_tokens: int) -> None:
    """Refuse rows longer than a model's learned positions, which have no embedding there; warn, once, for computed
    (rotary) positions, which go on past what the model was trained on."""
    inner = unwrap_peft(model)
    limit = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or prompt_tokens + response_tokens <= limit:
        return
    line = (
        f"a prompt of {prompt_tokens} tokens and response_length {response_tokens} exceed the model's {limit} "
        "positions; shorten one of them."
    )
    tables = [module for module in inner.modules() if isinstance(module, nn.Embedding)]
    if any(table is not inner.get_input_embeddings() and table.num_embeddings >= limit for table in tables):
        raise ValueError(line)
    logger.warning_once(line)
