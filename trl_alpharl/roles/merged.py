"""The policy's weights as a model without adapters has them: for rollouts, and for an engine with a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from .backbone import unwrap_peft
from .prepare import is_quantized


def mergeable(policy: nn.Module) -> bool:
    """Whether an adapter's every part can be added to a weight that nothing else uses. Not to quantized weights: they
    would be rounded anew."""
    tuned = [m for m in policy.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if is_quantized(policy) or not all(type(layer) is Linear for layer in tuned):
        return False
    tied = unwrap_peft(policy).get_input_embeddings().weight
    return all(layer.base_layer.weight is not tied and not any(layer.lora_bias.values()) for layer in tuned)


def copy_fits(policy: nn.Module) -> bool:
    """Whether a copy of the adapted layers takes less than half of the free memory; on a CPU it always counts as
    fitting."""
    device = unwrap_peft(policy).device
    if device.type != "cuda":
        return True
    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    return sum(layer.get_base_layer().weight.nbytes for layer in layers) < torch.cuda.mem_get_info(device)[0] / 2


@contextmanager
def merged_adapter(policy: nn.Module, adapter: str) -> Iterator[None]:
    """All layers with the adapter in their weights: one matrix product instead of three, for as long as nothing
    learns. The weights themselves are not written to, so nothing drifts; the sums are a copy of the adapted layers."""
    with ExitStack() as stack:
        for layer in [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]:
            stack.enter_context(_merged(layer, adapter))
        yield


class MergedPolicy(nn.Module):
    """What `VLLMGeneration` gets as its model: `named_parameters` are those of the model on disk, with the policy's
    adapter merged in.

    Given a `PeftModel`, it would merge all layers in place and subtract the adapter again afterwards; that rounds, so
    bf16 weights of the base would drift with every rollout, and it knows an adapter named `default` only. Here one
    layer at a time is merged on a copy and then gets its own tensors back. Active adapters, `requires_grad` and the
    weights of all roles stay as they are.

    Raises ValueError for a policy whose weights such an engine cannot take over.
    """

    def __init__(self, policy: nn.Module, adapter: str | None) -> None:
        super().__init__()
        self.policy, self.adapter = policy, adapter
        inner = unwrap_peft(policy)
        self.name_or_path: str = inner.name_or_path
        if not self.name_or_path:
            raise ValueError("use_vllm: model has no name; vLLM loads it by its name or folder, so load it from there.")
        if is_quantized(policy):
            raise ValueError(
                "use_vllm: model is quantized, and vLLM would quantize the merged weights anew, which is another "
                "policy; load it in bf16, or leave use_vllm out."
            )
        ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
        adapted = any(isinstance(end, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for end in ends)
        if adapted and getattr(inner.config.get_text_config(), "tie_word_embeddings", False):
            raise ValueError(
                "use_vllm: the adapter changes embeddings that the model ties to its head, and vLLM has one matrix for "
                "both; leave them out of peft_config."
            )

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight once, in order. A merged one holds the sum until the next is asked for; its `data` taken before
        that stays valid."""
        seen: set[int] = set()
        for name, parameter in _walk(unwrap_peft(self.policy), "", self.adapter):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def _walk(module: nn.Module, prefix: str, adapter: str | None) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module, under the names that they have without PEFT's wrappers."""
    if isinstance(module, ModulesToSaveWrapper):
        has_copy = adapter in module.modules_to_save
        yield from _walk(module.modules_to_save[adapter] if has_copy else module.original_module, prefix, adapter)
    elif isinstance(module, AuxiliaryTrainingWrapper):  # of trainable tokens
        yield from _walk(module.token_adapter, prefix, adapter)
    elif isinstance(module, BaseTunerLayer):
        with _merged(module, adapter):
            yield from _walk(module.get_base_layer(), prefix, adapter)
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield prefix + name, parameter
        for name, child in module.named_children():
            yield from _walk(child, f"{prefix}{name}.", adapter)


@contextmanager
def _merged(layer: BaseTunerLayer, adapter: str | None) -> Iterator[None]:
    """The layer's base weights with the adapter in them; the layer's own tensors are never written to."""
    parameters = list(layer.get_base_layer().parameters())
    own = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    try:
        layer.merge(adapter_names=[adapter])
        yield
    finally:
        for parameter, data in zip(parameters, own):
            parameter.data = data
        layer.merged_adapters.clear()  # PEFT's `unmerge` would subtract from what is whole again
