"""Taking gradients during backward, and letting go of them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class GradientTaker:
    """Hands each finished gradient of the watched parameters to an optimizer and sets `p.grad` to None.

    A hook outlives its use: a model that was trained here and goes on elsewhere, under plain AdamW say, would learn
    nothing. So the hooks go when the optimizer is deleted, when `release` is called (trainers do at the end of
    training), or when another taker watches the same parameter; the optimizer that lost it learns that from
    `displaced`.

    Args: observe, a method of the optimizer that takes the parameter; it is held weakly.
    """

    def __init__(self, observe: Callable[[nn.Parameter], Any]) -> None:
        self._observe = weakref.WeakMethod(observe)
        self._handles: dict[nn.Parameter, Any] = {}
        self.released = False

    def watch(self, parameter: nn.Parameter) -> None:
        """Take this parameter's gradients from now on."""
        parameter._low_rank_taker = self
        self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._take)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        observe = self._observe()
        if observe is None:
            self.release()
        elif parameter._low_rank_taker is self:
            observe(parameter)
            parameter.grad = None

    def displaced(self) -> bool:
        """Whether another taker now gets some of these gradients."""
        return not self.released and any(parameter._low_rank_taker is not self for parameter in self._handles)

    def release(self) -> None:
        """Leave gradients alone."""
        for handle in self._handles.values():
            handle.remove()
        self.released = True

    def attach(self) -> None:
        """Take gradients again after `release`."""
        if self.released:
            self.released = False
            for parameter in list(self._handles):
                self.watch(parameter)
