# ruff: noqa: RUF009
"""The fields of low-rank gradients, plain and as a trainer's config has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, get_type_hints

from .field import knob

Storage = Literal["fp32", "bf16", "fp8", "int8", "8bit", "nf4"]
SubspaceMethod = Literal["power", "rsvd", "svd", "random", "column_sampled", "masked"]


@dataclass
class LowRankKnobs:
    """How gradients are projected on a few directions. `lowrank.config.LowRankConfig` checks these fields; a recipe
    writes them with the prefix `lowrank_`."""

    # Rank
    rank: int = knob(
        64,
        "Rank of a projected gradient. rank_policy sqrt: the most that the rule may give; energy: where it starts; "
        "tanh: not used.",
    )
    rank_policy: Literal["fixed", "tanh", "energy", "sqrt"] = knob(
        "fixed",
        "tanh: grows with the steps. energy: each matrix gets the rank that holds a share of its gradient's energy. "
        "sqrt: 0.15 sqrt(hidden size x layers), once.",
    )
    rank_pattern: dict | str | None = knob(
        None,
        "Ranks by module: {pattern of the parameter's name: rank}, the first that is found wins, rank 0 leaves the "
        "matrix alone; or a preset, 'paper' or 'energy'. With rank_policy fixed.",
    )
    tanh_base: int = knob(32, "rank_policy tanh: rank at the start.")
    tanh_delta: int = knob(64, "rank_policy tanh: what the rank grows by in the end.")
    tanh_tau: float = knob(1000.0, "rank_policy tanh: optimizer steps until three quarters of that growth.")
    energy: float = knob(0.9, "rank_policy energy: the share of a gradient's squared norm to hold.")
    rank_min: int = knob(8, "rank_policy energy: the least rank.")
    rank_max: int = knob(128, "rank_policy energy: the greatest rank.")

    # Subspace
    side: Literal["in", "out", "short", "long"] = knob(
        "in", "Side of a matrix that is projected: the layer's input or output, the shorter or the longer one."
    )
    refresh: SubspaceMethod | None = knob(
        None, "How a basis is found. None: power in the optimizer, rsvd in the callback. svd: exact. masked: harmful."
    )
    update_gap: int = knob(
        50, "Optimizer steps between renewals of a basis, at rollout boundaries, not all matrices at once. 0: never."
    )
    rotate_moments: bool = knob(True, "Move Adam's moments into a new basis; false leaves them behind (worse).")

    # Update
    update: Literal["adam", "scaled"] = knob(
        "adam",
        "adam: Adam inside the subspace. scaled: the full gradient, each channel scaled as Adam in the subspace would "
        "(APOLLO); for very low ranks, and the full gradient stays.",
    )
    scale: float = knob(1.0, "Factor on the update of projected matrices.")
    accumulate_in_subspace: bool | None = knob(
        None,
        "Project each micro-batch's gradient during backward and drop it, so that full gradients never exist together. "
        "None: yes, unless update is scaled or several processes reduce full gradients.",
    )
    norm_sketch: int = knob(
        4,
        "Random columns that estimate the norm of what lies outside the subspace, for clipping; three times as many "
        "beside a random basis.",
    )
    small_lora: bool = knob(False, "Project LoRA factors of rank 64 and less too (worse than a smaller LoRA).")

    # Storage
    basis_storage: Storage = knob("bf16", "How bases are kept.")
    moment_storage: Storage = knob(
        "8bit", "How the moments of projected matrices are kept; 8bit is bitsandbytes' form."
    )
    accumulator_storage: Storage = knob("fp32", "How projected gradients are kept between micro-batches.")
    plain_storage: Storage = knob("fp32", "How the moments of all other parameters are kept; 8bit suits LoRA factors.")
    stochastic_rounding: bool = knob(
        True, "Round updates of bf16 weights up or down at random, which keeps small ones."
    )

    # Several processes
    all_reduce: Literal["full", "powersgd", "projected"] = knob(
        "full",
        "What processes exchange: full gradients, rank-all_reduce_rank approximations with error feedback (PowerSGD), "
        "or projected gradients.",
    )
    all_reduce_rank: int = knob(16, "all_reduce powersgd: rank.")

    seed: int = knob(0, "Seed of random bases, sketches and rounding.")


@dataclass
class LowRankSwitch:
    """Whether gradients are projected at all."""

    # Low-rank gradients
    lowrank: Literal["none", "callback", "optimizer"] = knob(
        "none",
        "callback: each gradient's low-rank approximation, for any optimizer. optimizer: AdamW whose gradients and "
        "state live in subspaces. The fields below set it up.",
    )


def _with_prefix(source: type, prefix: str, base: type) -> type:
    """A dataclass with the fields of another one after those of `base`, their names prefixed."""
    kinds = get_type_hints(source)
    renamed = [
        (prefix + f.name, kinds[f.name], field(default=f.default, metadata=f.metadata))
        for f in dataclasses.fields(source)
    ]
    namespace = {"__module__": __name__, "__doc__": f"`{source.__name__}` with the prefix `{prefix}`."}
    return dataclasses.make_dataclass(f"Prefixed{source.__name__}", renamed, bases=(base,), namespace=namespace)


LOWRANK_PREFIX = "lowrank_"
PrefixedLowRankKnobs = _with_prefix(LowRankKnobs, LOWRANK_PREFIX, LowRankSwitch)
# The classes in whose source a made one's fields stand, and the prefix that they got.
WRITTEN_IN: dict[type, tuple[tuple[type, str], ...]] = {
    PrefixedLowRankKnobs: ((LowRankSwitch, ""), (LowRankKnobs, LOWRANK_PREFIX))
}
