"""One projected matrix: what a step keeps of its gradient, its update, the renewal of its basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.moments import (
    Moments,
    adam_direction,
    channel_scales,
    empty_moments,
    resize_moments,
    transport_moments,
    update_moments,
)
from ..functional.quantize import stochastic_round
from ..functional.subspace import SUBSPACE_METHODS, energy_rank, project, see, square_sum
from ..shapes import projected_dim, refresh_due, round_up
from .config import LowRankConfig
from .storage import fetch, fetch_moments, seeded_generator, store, store_moments, tensor_bytes

_SMALLEST_MOVE = 0.25  # the energy policy leaves smaller changes of a rank alone: each costs a transport
_GROWTH = 1.5  # and lets a rank grow by no more than this at once
_BLIND = 3  # times as wide a sketch beside a random basis, which leaves most of a gradient's norm to it


@dataclass(frozen=True)
class Hyper:
    """The numbers of one update. `clip` scales the gradient."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: Tensor | float


@dataclass
class GradientParts:
    """What one optimizer step keeps of a gradient A (d, n), summed over its micro-batches.

    parts: in the storage kind of accumulators, `projected` (r, n) and, when the next basis is due, `seen` (d, s), which
        it is found from.
    sketch: random signs (w, d) times A, (w, n), for the norm.
    exact_square: the squared norm, while there was one micro-batch only.
    """

    parts: dict[str, Any]
    sketch: Tensor
    exact_square: Tensor | None

    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.parts) + self.sketch.nbytes


class ProjectedMatrix:
    """A weight whose gradient lives in a subspace.

    Args: parameter, 2-d; index, its place in the optimizer, which with the seed and the step draws all its randomness;
        in_dim, see `shapes.projected_dim`; start_rank, of the first basis; steps_per_rollout, see `shapes.refresh_due`.

    The methods take the optimizer's state of this parameter and the number of optimizer steps done so far. A basis
    found in step t serves from step t + 1, so one look at each micro-batch's gradient is enough. The very first one is
    random; what step 0 sees gives the second.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        index: int,
        in_dim: int,
        start_rank: int,
        config: LowRankConfig,
        steps_per_rollout: int,
    ) -> None:
        self.parameter, self.index, self.start_rank, self.config = parameter, index, start_rank, config
        self.steps_per_rollout = steps_per_rollout
        self.dim = projected_dim(tuple(parameter.shape), config.side, in_dim)
        self.d, self.n = parameter.shape[self.dim], parameter.shape[1 - self.dim]
        self.method = config.refresh or "power"
        self.gradient: GradientParts | None = None
        self.square: Tensor | None = None  # of the gradient at hand, once asked for
        self.energies: tuple[Tensor, Tensor] | None = None  # inside the subspace and whole, of the last gradient

    # During backward

    def observe(self, state: dict[str, Any], step: int, gradient: Tensor) -> None:
        """Take in one micro-batch's gradient, in the weight's shape."""
        if not state:
            self._start(state, step)
        matrix, basis, signs = self._oriented(gradient), self._basis(state), self._signs(state, step)
        both = torch.cat([basis, signs], dim=1).to(matrix.dtype)  # one pass over the gradient
        projected, sketch = project(both, matrix).float().split([basis.shape[1], signs.shape[1]])
        fresh = {"projected": projected}
        if self._is_due(state, step):
            fresh["seen"] = see(matrix, self._look(state, step)).float()
        kind = self.config.accumulator_storage
        if self.gradient is None:
            # In fp32 both stay parts of one product; else the sketch alone would keep the whole of it alive.
            sketch = sketch if kind == "fp32" else sketch.clone()
            self.gradient = GradientParts({}, sketch, exact_square=square_sum(gradient))
        else:
            fresh = {name: fetch(self.gradient.parts, name, part.shape).add_(part) for name, part in fresh.items()}
            self.gradient.sketch += sketch
            self.gradient.exact_square = None
        for name, part in fresh.items():
            store(self.gradient.parts, name, part, kind)
            self.gradient.parts[f"{name}_columns"] = part.shape[1]
        self.square = None

    def _start(self, state: dict[str, Any], step: int) -> None:
        rank = min(self.config.scheduled_rank(self.start_rank, step), self.d, self.n)
        nothing = torch.empty(self.d, 0, device=self.parameter.device)
        basis = SUBSPACE_METHODS["random"].find(nothing, rank, self._generator(step, "start"))
        state["rank"], state["refreshes"], state["d"] = rank, 0, self.d
        store(state, "basis", basis, self.config.basis_storage)

    def _is_first(self, state: dict[str, Any]) -> bool:
        """Whether the basis at hand is the random one that a method which looks at gradients has to start from."""
        return state["refreshes"] == 0 and self.method != "random"

    def _is_due(self, state: dict[str, Any], step: int) -> bool:
        due = refresh_due(step, self.index, self.config.update_gap, self.steps_per_rollout)
        return due or self._is_first(state)

    def _look(self, state: dict[str, Any], step: int) -> Tensor | None:
        """The look for the next basis, the same in every micro-batch of a step."""
        first = self._is_first(state)
        rows = None if first else self._moments(state).mean
        # All matrices look in the first step: `power` keeps a few columns of each, other methods up to everything.
        look = SUBSPACE_METHODS["power" if first else self.method].look
        return look(self.n, self._greatest_next_rank(state, step), self._generator(step, "look"), rows)

    def _greatest_next_rank(self, state: dict[str, Any], step: int) -> int:
        rank = self.config.scheduled_rank(self.start_rank, step + 1)
        if self.config.rank_policy == "energy":
            grown = min(self.config.rank_max, round_up(int(_GROWTH * state["rank"]), 8))
            rank = state["rank"] if self._is_first(state) else grown
        return min(rank, self.d, self.n)

    def open_for_sum(self, state: dict[str, Any]) -> list[Tensor]:
        """Everything linear in the gradient, in fp32 and to be changed in place: several processes average it."""
        parts, opened = self.gradient.parts, [self.gradient.sketch]
        for name, rows in (("projected", state["rank"]), ("seen", self.d)):
            if name in parts:
                opened.append(fetch(parts, name, (rows, parts[f"{name}_columns"])))
                store(parts, name, opened[-1], "fp32")
        self.gradient.exact_square = None
        return opened

    # After backward

    def square_norm(self, state: dict[str, Any], step: int) -> Tensor:
        """The squared norm of the whole gradient: exact after one micro-batch, else unbiased.

        The part in the subspace is known; random signs estimate the rest. A sketch of the whole would be far off where
        one direction dominates.
        """
        if self.square is None:
            projected = fetch(self.gradient.parts, "projected", (state["rank"], self.n))
            inside = square_sum(projected)
            self.square = self.gradient.exact_square
            if self.square is None:
                seen_inside = project(self._signs(state, step), self._basis(state)) @ projected
                outside = square_sum(self.gradient.sketch - seen_inside) / len(seen_inside)
                self.square = inside + outside
            self.energies = (inside, self.square)
        return self.square

    def update(self, state: dict[str, Any], step: int, hyper: Hyper) -> None:
        """Adam on the projected gradient, the weight's update, and the next basis when it is due."""
        basis = self._basis(state)
        projected = fetch(self.gradient.parts, "projected", (state["rank"], self.n)).mul_(hyper.clip)
        moments = update_moments(self._moments(state), projected, hyper.betas)
        direction = adam_direction(moments, hyper.eps)
        keep, move = 1 - hyper.lr * hyper.weight_decay, -hyper.lr * self.config.scale
        weight = self._oriented(self.parameter.data)
        target = weight if weight.dtype == torch.float32 else weight.float()
        if self.config.update == "adam":
            target.addmm_(basis, direction, beta=keep, alpha=move)
        else:
            full = self._oriented(self.parameter.grad).float() * channel_scales(projected, direction)
            target.mul_(keep).add_(full, alpha=move)
        if target is not weight:
            self._write(weight, target, step)
        if "seen" in self.gradient.parts:
            moments = self._renew(state, step, basis, moments)
        self._store_moments(state, moments)
        self.discard()

    def _write(self, weight: Tensor, target: Tensor, step: int) -> None:
        if weight.dtype == torch.bfloat16 and self.config.stochastic_rounding:
            target = stochastic_round(target, self._generator(step, "round"))
        weight.copy_(target)

    def _renew(self, state: dict[str, Any], step: int, basis: Tensor, moments: Moments) -> Moments:
        """Store the next basis and return the moments in it."""
        seen = fetch(self.gradient.parts, "seen", (self.d, self.gradient.parts["seen_columns"]))
        if self.method != "random" and not seen.any():
            # Zeros show no direction: the first gradient of LoRA's A, where B starts at zero, would leave A a random
            # basis until the next turn. A first basis is looked for again in the next step.
            return moments
        rank = self._next_rank(state, step)
        method = SUBSPACE_METHODS["power" if self._is_first(state) else self.method]
        found = method.find(seen, rank, self._generator(step, "find"))
        state["rank"], state["refreshes"] = rank, state["refreshes"] + 1
        store(state, "basis", found, self.config.basis_storage)
        if self.config.rotate_moments:
            return transport_moments(moments, project(self._basis(state), basis))
        return resize_moments(moments, rank)

    def _next_rank(self, state: dict[str, Any], step: int) -> int:
        """The schedule's rank; under the energy policy the one that holds the share, where it differs enough."""
        greatest = self._greatest_next_rank(state, step)
        if self.config.rank_policy != "energy" or self._is_first(state):
            return greatest
        inside, whole = self.energies
        projected = fetch(
            self.gradient.parts, "projected", (state["rank"], self.n)
        )  # clipped or not: only ratios count
        spectrum = torch.linalg.eigvalsh(projected @ projected.T).flip(0)
        enough = energy_rank(inside * spectrum / spectrum.sum(), whole, self.config.energy)
        wanted = greatest if enough is None else max(self.config.rank_min, round_up(enough, 8))
        moved = abs(wanted - state["rank"]) > _SMALLEST_MOVE * state["rank"]
        return min(wanted, greatest) if moved else state["rank"]

    def discard(self) -> None:
        """Forget the gradient."""
        self.gradient = self.square = None

    def _oriented(self, tensor: Tensor) -> Tensor:
        """The weight's shape as (d, n): the projected side first."""
        return tensor if self.dim == 0 else tensor.T

    def _basis(self, state: dict[str, Any]) -> Tensor:
        return fetch(state, "basis", (self.d, state["rank"]))

    def _moments(self, state: dict[str, Any]) -> Moments:
        if "mean" not in state:
            return empty_moments(state["rank"], self.n, self.parameter.device)
        return Moments(*fetch_moments(state, (state["rank"], self.n)), state["mean_mass"], state["square_mass"])

    def _store_moments(self, state: dict[str, Any], moments: Moments) -> None:
        store_moments(state, moments.mean, moments.square, self.config.moment_storage)
        state["mean_mass"], state["square_mass"] = moments.mean_mass, moments.square_mass

    def _generator(self, step: int, purpose: str) -> torch.Generator:
        return seeded_generator(self.parameter.device, self.config.seed, self.index, step, purpose)

    def _signs(self, state: dict[str, Any], step: int) -> Tensor:
        generator = self._generator(step, "norm")
        blind = self.method == "random" or self._is_first(state)
        shape = (self.d, self.config.norm_sketch * (_BLIND if blind else 1))
        return torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2.0 - 1.0
