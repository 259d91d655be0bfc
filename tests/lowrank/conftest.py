"""A small network with two matrices worth projecting, and functions that train it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trl_alpharl.lowrank.config import LowRankConfig

EXACT = dict.fromkeys(("basis_storage", "moment_storage", "accumulator_storage", "plain_storage"), "fp32")


class Network(nn.Module):
    """(B, 48) -> (B, 4). `first` (96, 48), `second` (80, 96); `last` (4, 80), biases and the 0-d `gain` stay plain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(48, 96), nn.Linear(96, 80), nn.Linear(80, 4)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.gain * self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.fixture
def network():
    """Makes a network; each has the same weights."""
    return Network


@pytest.fixture
def exact():
    """Makes a config of rank 8 that stores everything in fp32."""
    return lambda **changes: LowRankConfig(**{"rank": 8, **EXACT, **changes})


def _loss(model, step: int, part: slice = slice(None)) -> torch.Tensor:
    """A share of the loss of a step's eight rows; the input has 12 directions, so there is a structure to find."""
    generator = torch.Generator().manual_seed(100 + step)
    mix = torch.randn(12, 48, generator=torch.Generator().manual_seed(1))
    x = torch.randn(8, 12, generator=generator) @ mix / 4
    y = torch.stack([x[:, :4].sum(1), x[:, 4:9].sum(1), x[:, 0], -x[:, 1]], dim=1)
    x, y = x.to(model.gain.dtype), y.to(model.gain.dtype)
    return (model(x[part]) - y[part]).square().sum() / y.numel()


@pytest.fixture
def loss():
    """loss(model, step): of a step's eight rows."""
    return _loss


@pytest.fixture
def backward():
    """backward(model, step, parts=1): gradients of a step's loss, in so many micro-batches."""

    def run(model, step: int, parts: int = 1) -> None:
        size = 8 // parts
        for start in range(0, 8, size):
            _loss(model, step, slice(start, start + size)).backward()

    return run


@pytest.fixture
def train(backward):
    """train(model, optimizer, steps, parts=1): optimizer steps with these numbers."""

    def run(model, optimizer, steps, parts: int = 1) -> None:
        for step in steps:
            backward(model, step, parts)
            optimizer.step()
            optimizer.zero_grad()

    return run


@pytest.fixture
def weights():
    """weights(model): all of them in one vector."""
    return lambda model: torch.cat([p.detach().float().flatten() for p in model.parameters()])
