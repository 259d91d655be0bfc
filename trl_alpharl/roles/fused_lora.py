"""LoRA layers as one operation with a backward of its own.

PEFT's layer casts its input to the adapter's fp32, keeps that copy for the backward pass, beside the input itself, and
adds fp32 numbers to the layer's bf16 ones. Here everything is in the precision of the weights, and the input is kept
once. Adapters stay fp32 where the optimizer sees them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fuse_lora(model: nn.Module) -> int:
    """Let LoRA layers over plain linear weights run as one operation; returns how many do. The adapters' parameters,
    PEFT's switches, merging and saving are untouched; what the operation does not cover goes PEFT's way: quantized
    weights, DoRA and other variants, dropout, several adapters at once, weights of another dtype than the input's."""
    layers = [m for m in model.modules() if type(m) is Linear and type(m.base_layer) is nn.Linear]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _forward(self: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    adapter = self._active_adapter[0] if len(self._active_adapter) == 1 else None
    weight, device = self.base_layer.weight, x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if adapter not in self.lora_A or self.disable_adapters or self.merged or args or kwargs or weight.dtype != dtype:
        return type(self).forward(self, x, *args, **kwargs)
    down, up = self.lora_A[adapter], self.lora_B[adapter]
    plain = adapter not in self.lora_variant and down.bias is None and up.bias is None and not self.fan_in_fan_out
    if not plain or weight.requires_grad or getattr(self.lora_dropout[adapter], "p", 0.0):
        return type(self).forward(self, x, *args, **kwargs)
    scale = self.scaling[adapter]
    return _LoraLinear.apply(x.to(dtype), weight, self.base_layer.bias, down.weight, up.weight, scale)


class _LoraLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T; W and b are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float):
        with torch.autocast(x.device.type, enabled=False):
            rows = x.flatten(0, -2)
            down, up = down.to(x.dtype), up.to(x.dtype) * scale
            inner = rows @ down.T
            output = nn.functional.linear(rows, weight, bias).addmm_(inner, up.T)
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scale, ctx.shape = scale, x.shape
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inner = ctx.saved_tensors
        needs_x, _, _, needs_down, needs_up, _ = ctx.needs_input_grad
        gradient = gradient.reshape(-1, gradient.shape[-1])
        inner_gradient = gradient @ up
        by_down = inner_gradient.T @ rows if needs_down else None
        by_up = (gradient.T @ inner).mul_(ctx.scale) if needs_up else None
        by_x = (gradient @ weight).addmm_(inner_gradient, down).view(ctx.shape) if needs_x else None
        return by_x, None, None, by_down, by_up, None
