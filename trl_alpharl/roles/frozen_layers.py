"""The decoder layers below the lowest one that learns: the same for policy, reference and critic, and for a whole
rollout. What they give is kept, and every later pass starts from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .backbone import decoder_of, hidden_states, layers_name, unwrap_peft


class FrozenLayers:
    """Runs the frozen layers of a decoder alone, or has its output stand in for them.

    `models`: the policy, and other models whose frozen layers hold the same weights. While another pass uses what was
    kept, the decoder sees stand-ins in the frozen layers' places; positions, masks and everything above run as ever.
    """

    def __init__(self, models: Sequence[nn.Module], count: int) -> None:
        self.count = count
        self._decoders = [decoder_of(model) for model in models]
        self._names = [layers_name(decoder) for decoder in self._decoders]
        below = list(getattr(self._decoders[0], self._names[0]))[:count]
        self._constant = [parameter for layer in below for parameter in layer.parameters()]

    def run(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Hidden states (R, W, H) that the lowest learning layer is given, without gradients."""
        decoder, name = self._decoders[0], self._names[0]
        layers = list(getattr(decoder, name))
        layers[self.count] = _Stop(layers[self.count])
        try:
            with torch.no_grad(), _layers(decoder, name, layers):
                hidden_states(decoder, input_ids, attention_mask, position_ids)
        except _Reached as reached:
            return reached.hidden
        raise RuntimeError("the decoder did not run its layers in order")

    @contextmanager
    def replaced_by(self, hidden: Tensor) -> Iterator[None]:
        """All decoders with `hidden`, what `run` gave, in place of their frozen layers.

        Raises RuntimeError when one of these has been unfrozen since: it would get no gradient.
        """
        if any(parameter.requires_grad for parameter in self._constant):
            raise RuntimeError(
                "a layer that was frozen when the trainer was made learns now; set cache_frozen_layers to false."
            )
        with ExitStack() as stack:
            for decoder, name in zip(self._decoders, self._names):
                real = getattr(decoder, name)
                below = [_StandIn(layer, hidden if at == self.count - 1 else None) for at, layer in enumerate(real)]
                stack.enter_context(_layers(decoder, name, [*below[: self.count], *real[self.count :]]))
            yield


def frozen_layers(policy: nn.Module, copies: Sequence[nn.Module] = ()) -> FrozenLayers | None:
    """The frozen layers of a policy; None when there are none, or when running the decoder in two parts does not give
    what running it whole gives (layers that read more than their predecessor's output)."""
    decoder = decoder_of(policy)
    name = layers_name(decoder)
    if name is None or _learns(unwrap_peft(policy).get_input_embeddings()):
        return None
    layers = list(getattr(decoder, name))
    count = next((at for at, layer in enumerate(layers) if _learns(layer)), len(layers) - 1)
    if count == 0:
        return None
    found = FrozenLayers([policy, *copies], count)
    return found if _same_in_two_parts(found, decoder) else None


def _learns(module: nn.Module) -> bool:
    """Whether a module learns or is another one for another role."""
    adapted = any(isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for part in module.modules())
    return adapted or any(parameter.requires_grad for parameter in module.parameters())


@torch.no_grad()
def _same_in_two_parts(frozen: FrozenLayers, decoder: nn.Module) -> bool:
    device = next(decoder.parameters()).device
    if device.type == "meta":
        return False
    ids = torch.tensor([[0, 1, 0], [1, 0, 0]], device=device)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=device)
    tokens = (ids, mask, torch.arange(3, device=device).expand(2, 3))
    training = decoder.training
    decoder.eval()
    try:
        whole = hidden_states(decoder, *tokens)
        with frozen.replaced_by(frozen.run(*tokens)):
            return torch.equal(hidden_states(decoder, *tokens), whole)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False  # a decoder that reads its layers in another way
    finally:
        decoder.train(training)


@contextmanager
def _layers(decoder: nn.Module, name: str, layers: list[nn.Module]) -> Iterator[None]:
    real = decoder._modules[name]
    decoder._modules[name] = nn.ModuleList(layers)
    try:
        yield
    finally:
        decoder._modules[name] = real


class _StandIn(nn.Module):
    """In a layer's place: passes its input on, or gives what the layer once gave. Attributes are the layer's."""

    def __init__(self, layer: nn.Module, hidden: Tensor | None) -> None:
        super().__init__()
        self.__dict__["layer"], self.__dict__["hidden"] = layer, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states."""
        return hidden_states if self.hidden is None else self.hidden


class _Stop(_StandIn):
    """Ends a pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, None)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Raises _Reached."""
        raise _Reached(hidden_states)


class _Reached(Exception):
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
