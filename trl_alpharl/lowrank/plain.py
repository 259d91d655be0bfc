"""AdamW for the parameters that are not projected, with the same storage kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ..functional.quantize import stochastic_round
from .config import LowRankConfig
from .storage import fetch_moments, seeded_generator, store_moments


def update_plain(
    parameters: Mapping[nn.Parameter, int], states: Mapping[Any, dict], group: dict[str, Any], config: LowRankConfig
) -> None:
    """One AdamW step from `p.grad`, by torch's own function.

    Args: parameters, with their index in the optimizer; states, the optimizer's; group, the numbers of the step.

    fp32 weights with fp32 moments go through one call; others one by one, so that no more than one parameter's fp32
    copies exist at a time.
    """
    for parameter in parameters:
        if not states[parameter]:
            states[parameter]["steps"] = 0
            zeros = torch.zeros_like(parameter, dtype=torch.float32)
            store_moments(states[parameter], zeros, zeros.clone(), config.plain_storage)
        states[parameter]["steps"] += 1
    whole = {p for p in parameters if p.dtype == torch.float32 and config.plain_storage == "fp32"}
    together = [p for p in parameters if p in whole]
    for some in ([together] if together else []) + [[p] for p in parameters if p not in whole]:
        weights = [p.data.float() for p in some]  # an fp32 weight itself
        moments = [fetch_moments(states[p], p.shape) for p in some]
        _adamw(weights, [p.grad.float() for p in some], moments, [states[p]["steps"] for p in some], group)
        for parameter, weight, (mean, square) in zip(some, weights, moments):
            store_moments(states[parameter], mean, square, config.plain_storage)
            if parameter.dtype == torch.float32:
                continue
            if parameter.dtype == torch.bfloat16 and config.stochastic_rounding:
                draws = (config.seed, parameters[parameter], group["step"], "round")
                weight = stochastic_round(weight, seeded_generator(parameter.device, *draws))
            parameter.data.copy_(weight)


def _adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: list[tuple[Tensor, Tensor]],
    steps: list[int],
    group: dict[str, Any],
) -> None:
    adamw(
        weights,
        gradients,
        [mean for mean, _ in moments],
        [square for _, square in moments],
        [],
        [torch.tensor(float(step - 1)) for step in steps],  # the function counts up
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
