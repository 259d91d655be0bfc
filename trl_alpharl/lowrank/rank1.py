"""Rank-1 dynamics of training: how much of a weight's path is one straight line, and an optional step along it.

AlphaRL's published form looks at the leading direction of W_t - W_0; RELEX extrapolates along it. Both from deltas
alone: the h x h inner products of h deltas give the leading direction of the stack, no SVD of a large matrix is
needed, and LoRA factors are weights like others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .callback import TrainerCallback, add_to_log

logger = logging.getLogger(__name__)


class Rank1Fit(NamedTuple):
    """The straight line in a path of deltas.

    share: of the deltas' squared norm that their leading direction u holds, in [0, 1].
    r2: how well a line in time fits the coefficients <D_i, u>; 1 for a path that moves evenly.
    alignment: |cos| between u and the newest delta.
    per_step: weights (h,) with which the deltas add up to the line's advance in one optimizer step.
    """

    share: float
    r2: float
    alignment: float
    per_step: Tensor


def fit_rank1(products: Tensor, steps: Sequence[int]) -> Rank1Fit:
    """The fit from the inner products K_ij = <D_i, D_j> (h, h) of h >= 3 deltas taken at optimizer steps (h,).

    With K q = lambda q for the greatest lambda, u = sum_i q_i D_i / sqrt(lambda) and <D_i, u> = sqrt(lambda) q_i.

    >>> steps = [1, 2, 3]
    >>> fit = fit_rank1(torch.outer(torch.tensor(steps) * 1.0, torch.tensor(steps) * 1.0), steps)
    >>> round(fit.share, 5), round(fit.r2, 5), round(float(fit.per_step @ torch.tensor([1.0, 2.0, 3.0]).double()), 5)
    (1.0, 1.0, 1.0)
    """
    products = products.double()
    values, vectors = torch.linalg.eigh(products)
    root, leading = values[-1].clamp(min=1e-300).sqrt(), vectors[:, -1]
    coefficients = root * leading
    times = torch.tensor(steps, dtype=torch.float64)
    times, centred = times - times.mean(), coefficients - coefficients.mean()
    slope = (times @ centred) / (times @ times)
    spread = centred.square().sum()
    r2 = 1 - (centred - slope * times).square().sum() / spread if spread > 0 else spread
    newest = products[-1, -1].clamp(min=1e-300).sqrt()
    return Rank1Fit(
        share=float(values[-1] / products.trace().clamp(min=1e-300)),
        r2=float(r2),
        alignment=float(coefficients[-1].abs() / newest),
        per_step=slope * leading / root,
    )


class Rank1Monitor(TrainerCallback):
    """Logs `lowrank/rank1_share`, `lowrank/rank1_r2` and `lowrank/rank1_alignment`: means over the watched matrices,
    weighted by how far they moved.

    With `extrapolate=True` it also moves each watched weight `ahead` steps along its line, once the window is full and
    r2 is at least `min_r2`, and takes that back when `check` says that it made things worse; training continues either
    way. In short runs extrapolating lost to simply stopping there (docs/low-rank.md), so it is off by default.

    Args:
        every: optimizer steps between two deltas.
        window: deltas kept, at least 3; each is a copy of the watched weights, in bf16 on the CPU.
        modules: watch the trainable matrices whose name has this pattern.
        extrapolate, ahead, min_r2: see above.
        check: model -> score, higher is better, on held-out prompts; the same answer on every process.

    Raises ValueError for a window below 3, or `extrapolate` without `check`.
    """

    def __init__(
        self,
        every: int = 10,
        window: int = 8,
        modules: str = "",
        extrapolate: bool = False,
        check: Callable[[nn.Module], float] | None = None,
        ahead: int = 50,
        min_r2: float = 0.95,
    ) -> None:
        if window < 3 or every < 1:
            raise ValueError(
                f"window, every: found {window}, {every}; a line needs 3 deltas, taken every step or rarer."
            )
        if extrapolate and check is None:
            raise ValueError("extrapolate needs `check`, a held-out score by which a bad step is taken back.")
        self.every, self.window, self.modules = every, window, modules
        self.extrapolate, self.check, self.ahead, self.min_r2 = extrapolate, check, ahead, min_r2
        self.accepted = self.rejected = 0
        self._latest: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the weights as they are for the start of the path; a resumed run starts a new one."""
        self._watched = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.ndim == 2 and re.search(self.modules, name)
        ]
        if not self._watched:
            raise ValueError(f"modules: no trainable matrix has {self.modules!r} in its name.")
        self._restart()

    def _restart(self) -> None:
        self._start = [parameter.detach().to("cpu", copy=True) for parameter in self._watched]
        self._deltas: list[list[Tensor]] = []
        self._steps: list[int] = []

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take a delta when it is time; a full window gives the fit, and perhaps a step along it."""
        if state.global_step % self.every:
            return
        self._deltas.append(
            [(p.detach().cpu().float() - start.float()).bfloat16() for p, start in zip(self._watched, self._start)]
        )
        self._steps.append(state.global_step)
        if len(self._steps) < self.window:
            return
        fits = [self._fit(matrix) for matrix in range(len(self._watched))]
        weights = torch.tensor([float(delta.float().square().sum()) for delta in self._deltas[-1]])
        weights = weights / weights.sum().clamp(min=1e-30)
        means = {
            name: float(weights @ torch.tensor([getattr(fit, name) for fit in fits]))
            for name in ("share", "r2", "alignment")
        }
        self._latest = {f"lowrank/rank1_{name}": value for name, value in means.items()}
        if self.extrapolate and means["r2"] >= self.min_r2:
            self._step_along(model, fits)
            self._restart()
        else:
            self._deltas.pop(0)
            self._steps.pop(0)

    def _fit(self, matrix: int) -> Rank1Fit:
        flat = torch.stack([deltas[matrix].float().flatten() for deltas in self._deltas])
        return fit_rank1(flat @ flat.T, self._steps)

    def _step_along(self, model: nn.Module, fits: list[Rank1Fit]) -> None:
        """Advance every watched weight along its line, and back when the held-out score falls."""
        before = self._score(model)
        kept = [parameter.detach().clone() for parameter in self._watched]
        for number, (parameter, fit) in enumerate(zip(self._watched, fits)):
            advance = sum(w * deltas[number].double() for w, deltas in zip(fit.per_step.tolist(), self._deltas))
            parameter.add_((self.ahead * advance).to(parameter))
        after = self._score(model)
        if after >= before:
            self.accepted += 1
        else:
            self.rejected += 1
            for parameter, old in zip(self._watched, kept):
                parameter.copy_(old)
        verdict = "kept" if after >= before else "taken back"
        logger.warning(f"rank-1 step of {self.ahead}: held-out score {before:.4g} -> {after:.4g}, {verdict}.")

    def _score(self, model: nn.Module) -> float:
        training = model.training
        score = float(self.check(model))
        model.train(training)
        return score

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the latest fit."""
        if logs is not None and "loss" in logs and self._latest:
            counts = {"lowrank/rank1_kept": self.accepted, "lowrank/rank1_taken_back": self.rejected}
            add_to_log(state, logs, {**self._latest, **(counts if self.extrapolate else {})})
