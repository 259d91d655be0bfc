"""Reaching inside a causal language model or a sequence classifier: its decoder, its head, what follows the head."""

from __future__ import annotations

import inspect

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..functional.frozen_head import LinearHead


def unwrap_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder without its head. Adapters are injected in place, so they act here too."""
    inner = unwrap_peft(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"expected a transformers model, found {type(inner).__name__}.")
    decoder = getattr(inner, inner.base_model_prefix, None)
    if decoder is None:
        raise ValueError(
            f"{type(inner).__name__} has no decoder under `{inner.base_model_prefix}`; it is not supported."
        )
    return decoder


def layers_name(decoder: nn.Module) -> str | None:
    """Where a decoder keeps its layers: `layers`, or `h` in older models. None: somewhere else."""
    number = decoder.config.get_text_config().num_hidden_layers
    lists = [name for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)]
    return next((name for name in lists if len(getattr(decoder, name)) == number), None)


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """A decoder's layers, lowest first. Raises ValueError when they are not where decoders keep them."""
    name = layers_name(decoder)
    if name is None:
        raise ValueError(f"{type(decoder).__name__} keeps its layers in an unknown place; it is not supported here.")
    return list(getattr(decoder, name))


def head_name(model: PreTrainedModel) -> str:
    """The attribute that holds the head: `lm_head` in most models."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def hidden_states(decoder: nn.Module, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Last hidden states (R, W, H); no other layer's are kept."""
    output = decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    return output[0]


def take_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Hidden states (R, W, H) at `positions` (R, C), flattened to (R * C, H)."""
    index = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index).flatten(0, 1)


class FullPrecisionHead:
    """A language-model head as a function from hidden states (N, H) to fp32 logits (N, V).

    The product runs in fp32 also under autocast and for half-precision weights: rounding in the head reaches the
    probability ratio. What a model's config does after the head (soft-capping, scaling) is applied.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings; a causal language model is needed.")
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size  # columns of the logits
        multiply, divide = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self.scale = (1.0 if multiply is None else multiply) / (1.0 if divide is None else divide)
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            if type(self.head) is nn.Linear:
                bias = None if self.head.bias is None else self.head.bias.float()
                logits = nn.functional.linear(hidden.float(), self.head.weight.float(), bias)
            else:  # an adapter or quantized weights: the module decides, in the precision of its own weights
                dtype = next((p.dtype for p in self.head.parameters() if p.dtype.is_floating_point), torch.float32)
                logits = self.head(hidden.to(dtype)).float()
            logits = logits if self.scale == 1.0 else logits * self.scale
            return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def frozen(self) -> LinearHead | None:
        """The head as plain weights, when it is that and does not learn."""
        if type(self.head) is not nn.Linear or any(p.requires_grad for p in self.head.parameters()):
            return None
        return LinearHead(self.head.weight, self.head.bias, self.scale, self.cap)


@torch.no_grad()
def check_head(model: PreTrainedModel, head: FullPrecisionHead) -> None:
    """Compare our path to the logits with the model's own on two tokens; another result is refused.

    Raises ValueError for that, FloatingPointError when the model's logits are not finite.
    """
    if "position_ids" not in inspect.signature(decoder_of(model).forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no position_ids; it is not supported.")
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        return
    input_ids = torch.tensor([[0, 1]], device=device)
    ones = torch.ones_like(input_ids)
    was_training = model.training
    model.eval()
    expected = model(input_ids=input_ids, attention_mask=ones, use_cache=False).logits.float()
    ours = head(hidden_states(decoder_of(model), input_ids, ones, input_ids))
    model.train(was_training)
    if not expected.isfinite().all():
        raise FloatingPointError(f"{type(model).__name__} gives NaN or infinite logits.")
    scale = expected.abs().max().clamp(min=1e-3)
    dtypes = {parameter.dtype for parameter in head.head.parameters()}
    tolerance = 0.005 if dtypes == {torch.float32} else 0.05  # a half-precision head of the model's rounds
    if not torch.allclose(ours.view_as(expected), expected, rtol=0.0, atol=float(tolerance * scale)):
        raise ValueError(
            f"{type(model).__name__} computes its logits in a way this package does not know "
            f"(difference {float((ours.view_as(expected) - expected).abs().max()):.3g}); it is not supported."
        )
