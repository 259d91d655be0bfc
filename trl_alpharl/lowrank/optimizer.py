"""`LowRankAdamW`: AdamW whose gradients and state live in subspaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.subspace import square_sum
from ..shapes import low_rank_shape, saves_memory
from .config import LowRankConfig
from .distributed import average_tensors, is_distributed, present_anywhere, refuse_sharded
from .hooks import GradientTaker
from .matrix import Hyper, ProjectedMatrix
from .plain import update_plain
from .storage import tensor_bytes

_OWN_GROUP_KEYS = ("rank", "in_dim")  # decided by the present configuration, not by a checkpoint's


class LowRankAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with each large matrix's gradient, moments and basis at a low rank.

    A matrix's gradient is projected in a hook during backward and dropped: `p.grad` is None between micro-batches and
    the gradients of all layers never exist together. Parameters that are not projected (vectors, small matrices) get
    plain AdamW from their `p.grad`. docs/low-rank.md has the method and what was measured.

    Args:
        params: parameters, or groups. A group may hold `rank` (0: plain AdamW) and `in_dim` (the dimension that holds
            the layer's input); `param_groups.low_rank_groups` makes such groups from a model.
        lr: about 6 times AdamW's at rank 64, times sqrt(64 / rank).
        betas, eps, weight_decay: as in torch's AdamW; the decay comes before the step.
        config: LowRankConfig. None: its defaults.
        max_grad_norm: clip the global norm in `step`. None: the trainer calls `clip_grad_norm_`, or nothing clips.
        steps_per_rollout: bases are renewed only in the last of so many steps.

    Call `step` for every optimizer step, also for one without gradients: the count of steps follows it. A step whose
    gradient is not finite changes nothing and is counted in `skipped_steps`.

    Raises ValueError for parameters that it cannot project: sharded by FSDP or ZeRO, or flattened; RuntimeError for
    sparse gradients, and under an fp16 GradScaler, which cannot unscale what the hooks took.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        config: LowRankConfig | None = None,
        max_grad_norm: float | None = None,
        steps_per_rollout: int = 1,
    ) -> None:
        self.config = LowRankConfig() if config is None else config
        self.max_grad_norm, self.steps_per_rollout = max_grad_norm, steps_per_rollout
        self.accumulates = _accumulates(self.config)
        self._step_supports_amp_scaling = self.accumulates  # then a GradScaler comes to `step`, which refuses it
        self.sent_bytes = 0  # by this process for the last step, with all_reduce: projected
        self.last_norm = torch.zeros(())
        self.taker = GradientTaker(self.observe)
        self._matrices: dict[nn.Parameter, ProjectedMatrix] = {}
        self._indices: dict[nn.Parameter, int] = {}
        self._clip: Tensor | float = 1.0
        self._reduced = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "in_dim": 1}
        super().__init__(params, {**defaults, "step": 0, "skipped": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its matrices are projected from the next backward on."""
        if "rank" not in param_group:
            param_group["rank"] = self._rank_without_names()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if parameter in self._indices:  # moved here from another group
                continue
            refuse_sharded(parameter)
            index = self._indices[parameter] = len(self._indices)
            if is_projected(parameter, group["rank"], self.config.side, group["in_dim"]):
                matrix = ProjectedMatrix(
                    parameter, index, group["in_dim"], group["rank"], self.config, self.steps_per_rollout
                )
                self._matrices[parameter] = matrix
                if self.accumulates:
                    self.taker.watch(parameter)

    def _rank_without_names(self) -> int:
        if self.config.rank_pattern is not None:
            raise ValueError("rank_pattern goes by names: make the groups with low_rank_groups(model, config).")
        return self.config.start_rank("", None)

    def observe(self, parameter: nn.Parameter) -> bool:
        """Take in `p.grad` as one micro-batch's gradient, which the hooks do during backward; False when this parameter
        is not projected."""
        if parameter not in self._matrices:
            return False
        if parameter.grad.layout != torch.strided:
            raise RuntimeError("a gradient is sparse; low rank needs dense ones: nn.Embedding(sparse=False).")
        self._matrices[parameter].observe(self.state[parameter], self._steps_done, parameter.grad)
        return True

    # The norm

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the whole gradient at hand, of all parameters; see ProjectedMatrix.square_norm for its error."""
        self._reduce()
        squares = [square_sum(p.grad) for p in self._gradients()]
        squares += [matrix.square_norm(self.state[p], self._steps_done) for p, matrix in self._streamed()]
        if not squares:
            return torch.zeros(())
        return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient at hand so that its norm is at most `max_norm`; returns the norm before."""
        norm = self.grad_norm()
        if norm.isfinite():
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for parameter in self._gradients():
                parameter.grad.mul_(scale.to(parameter.grad))
            self._clip = self._clip * scale
        return norm

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step. Projected gradients are used up; `p.grad` of other parameters is left to `zero_grad`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.taker.displaced():
            raise RuntimeError("another LowRankAdamW was made for these parameters and takes their gradients.")
        if hasattr(self, "found_inf"):
            raise RuntimeError("LowRankAdamW does not work with an fp16 GradScaler; use bf16: true or fp32.")
        norm = self.grad_norm() if self.max_grad_norm is None else self.clip_grad_norm_(self.max_grad_norm)
        self.last_norm, finite = norm, bool(norm.isfinite())
        if finite:
            self._update()
        for group in self.param_groups:
            group["step"] += 1
            group["skipped"] += not finite
        self._discard()
        return loss

    def _update(self) -> None:
        step = self._steps_done
        for group in self.param_groups:
            plain = {p: self._indices[p] for p in group["params"] if p not in self._matrices and p.grad is not None}
            update_plain(plain, self.state, group, self.config)
            clip = self._clip if self.accumulates else 1.0  # p.grad is clipped in place
            hyper = Hyper(float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], clip)
            for parameter in group["params"]:
                matrix = self._matrices.get(parameter)
                if matrix is None:
                    continue
                if not self.accumulates and parameter.grad is not None:
                    self.observe(parameter)
                if matrix.gradient is not None:
                    matrix.square_norm(self.state[parameter], step)
                    matrix.update(self.state[parameter], step, hyper)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradient at hand, projected ones included."""
        self._discard()
        super().zero_grad(set_to_none)

    def _discard(self) -> None:
        for matrix in self._matrices.values():
            matrix.discard()
        self._clip, self._reduced = 1.0, False

    def _reduce(self) -> None:
        """Average what the processes hold, once a step, when the trainer leaves that to us."""
        if self._reduced or self.config.all_reduce != "projected" or not is_distributed():
            return
        self._reduced = True
        parameters = list(self._indices)
        held = [
            p.grad is not None or (p in self._matrices and self._matrices[p].gradient is not None) for p in parameters
        ]
        tensors = []
        for parameter, mine, anyones in zip(parameters, held, present_anywhere(held, parameters[0].device)):
            matrix = self._matrices.get(parameter)
            if anyones and matrix is not None:
                if not mine:
                    matrix.observe(self.state[parameter], self._steps_done, torch.zeros_like(parameter))
                tensors += matrix.open_for_sum(self.state[parameter])
            elif anyones:
                parameter.grad = parameter.grad if mine else torch.zeros_like(parameter)
                tensors.append(parameter.grad)
        self.sent_bytes = average_tensors(tensors)

    # State

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but nothing is cast: codes and scales keep their types. The rank and side in force are those of
        the configuration; a saved basis serves until it is renewed.

        Raises ValueError for the state of another optimizer, or of another side.
        """
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = {p: state_dict["state"][i] for i, p in zip(ids, parameters) if state_dict["state"].get(i)}
        for parameter, state in saved.items():
            self._check_saved(parameter, state)
        own = [{key: group[key] for key in _OWN_GROUP_KEYS} for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})
        for group, keys in zip(self.param_groups, own):
            group.update(keys)
        for parameter, state in saved.items():
            self.state[parameter] = {
                key: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                for key, value in state.items()
            }

    def _check_saved(self, parameter: nn.Parameter, saved: dict[str, Any]) -> None:
        matrix = self._matrices.get(parameter)
        # A matrix whose steps were all skipped has a basis and no moments yet.
        if ("rank" in saved) != (matrix is not None) or not ("rank" in saved or "square_is_root" in saved):
            raise ValueError(
                "the optimizer state was saved by another optimizer or with other projected matrices; "
                "resume with the configuration that it was saved with, or without the optimizer state."
            )
        if matrix is not None and saved["d"] != matrix.d:
            raise ValueError(
                f"the optimizer state was saved with another `side`: a basis has {saved['d']} rows, not {matrix.d}."
            )

    # What is logged

    @property
    def skipped_steps(self) -> int:
        """Steps so far whose gradient was not finite."""
        return self.param_groups[0]["skipped"]

    @property
    def _steps_done(self) -> int:
        return self.param_groups[0]["step"]

    def state_bytes(self) -> int:
        """Bytes of bases, moments and masses."""
        return sum(tensor_bytes(state) for state in self.state.values())

    def gradient_bytes(self) -> int:
        """Bytes of the gradients held now: projected ones with their sketches, and every `p.grad`."""
        total = sum(parameter.grad.nbytes for parameter in self._gradients())
        return total + sum(matrix.gradient.nbytes() for _, matrix in self._streamed())

    def statistics(self) -> dict[str, float]:
        """What the last step was like, by the keys of metrics_table."""
        found = {"lowrank/skipped_steps": self.skipped_steps, "lowrank/state_bytes": self.state_bytes()}
        if self.sent_bytes:
            found["lowrank/sent_bytes"] = self.sent_bytes
        energies = [matrix.energies for matrix in self._matrices.values() if matrix.energies is not None]
        if energies:
            inside, whole = (float(torch.stack(part).sum()) for part in zip(*energies))
            found["lowrank/energy"] = inside / max(whole, 1e-30)
            ranks = [state["rank"] for state in self.state.values() if "rank" in state]
            found["lowrank/rank"] = sum(ranks) / len(ranks)
        return found

    def _gradients(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _streamed(self) -> list[tuple[nn.Parameter, ProjectedMatrix]]:
        return [(p, matrix) for p, matrix in self._matrices.items() if matrix.gradient is not None]


def is_projected(parameter: nn.Parameter, rank: int, side: str, in_dim: int) -> bool:
    """Whether a parameter is a matrix that a projection of this rank makes smaller."""
    if parameter.ndim != 2 or not parameter.is_floating_point() or not parameter.requires_grad or rank == 0:
        return False
    return saves_memory(low_rank_shape(tuple(parameter.shape), rank, side, in_dim))


def _accumulates(config: LowRankConfig) -> bool:
    """Whether gradients are projected during backward; what several processes exchange in full has to stay."""
    exchanged = is_distributed() and config.all_reduce != "projected"
    if exchanged and config.accumulate_in_subspace:
        raise ValueError(
            f"accumulate_in_subspace: true leaves nothing for all_reduce: {config.all_reduce} to exchange; "
            "set all_reduce: projected."
        )
    return config.takes_gradients and not exchanged
