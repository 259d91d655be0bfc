"""A profile's time by kind of operation. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

KINDS = (
    "matmul",
    "attention",
    "head, log-probs, sampling",
    "compiled code",
    "elementwise and reductions",
    "copies and indexing",
    "optimizer",
    "Python, dispatch, waiting",
)
_HEAD = ("_FrozenHead", "_LogpsAndEntropy")  # trl_alpharl.functional's, which work on blocks; forward and backward
_MATMUL = {"mm", "addmm", "bmm", "baddbmm", "matmul"}
_EMBEDDING = {"embedding", "embedding_dense_backward"}
_COPYING = "copy_ _to_copy to clone contiguous cat stack repeat pad constant_pad_nd zero_ fill_ zeros empty"
_INDEXING = "index index_select index_put_ gather scatter slice select narrow expand"
_COPIES = {*_EMBEDDING, *_COPYING.split(), *_INDEXING.split()}


def kind_of(event: Any, vocabulary: int) -> str:
    """The kind of a profiler's event, by its name, its inputs' shapes and what encloses it. Work on tensors with
    `vocabulary` rows or columns is the head's, embeddings excepted, and so is all in the functions of `_HEAD`."""
    for outer in _with_ancestors(event):
        if outer.name.startswith("Optimizer."):
            return "optimizer"
        if outer.name.startswith(_HEAD):
            return "head, log-probs, sampling"
    if "Compiled" in event.name or "fused" in event.name.split("_"):
        return "compiled code"
    if "::" not in event.name or event.name.startswith("autograd::"):  # annotations, the autograd engine's own time
        return "Python, dispatch, waiting"
    name = event.name.split("::")[-1]
    if "attention" in name:
        return "attention"
    if name not in _EMBEDDING and any(vocabulary in shape for shape in event.input_shapes or []):
        return "head, log-probs, sampling"
    if name in _MATMUL or any(word in name for word in ("linear", "4bit", "blockwise")):
        return "matmul"
    return "copies and indexing" if name in _COPIES else "elementwise and reductions"


def seconds_by_kind(events: Iterable[Any], vocabulary: int, wall_s: float, device: str) -> dict[str, float]:
    """Seconds of each kind: of the kernels that operations started on the GPU, of operations themselves on the CPU.

    What `wall_s` has beyond them is Python, dispatch and waiting. `events`: those of operations, not of kernels.
    """
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        own_us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        found[kind_of(event, vocabulary)] += own_us / 1e6
    found[KINDS[-1]] = max(0.0, wall_s - sum(found[kind] for kind in KINDS[:-1]))
    return found


def _with_ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent
