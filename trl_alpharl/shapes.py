"""Integer rules for shapes. Standard library only.

Rows into chunks: in bf16 a row's log-probs depend on the shape (rows x padded width) of the chunk it runs in. So every
row gets one padded width for its whole rollout, every chunk has the same number of rows, and scoring and training see
a row in the same shape: the first probability ratio is then exactly 1. A few widths (classes) keep short rows from
paying for long ones.

Low rank: which side of a matrix is projected, which ranks a schedule gives, when a basis is renewed, and what all of it
costs in bytes. The optimizer and the tables in docs/low-rank.md use these same functions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

# Storage of a tensor: bits an element, and elements that share one fp32 scale (0: no scales).
STORAGE = {"fp32": (32, 0), "bf16": (16, 0), "fp8": (8, 128), "int8": (8, 128), "8bit": (8, 256), "nf4": (4, 64)}

_QUANTILES = 16  # candidate class borders; more gain little and cost a plan cubically


def plan_widths(
    lengths: list[int], mini_batches: list[list[list[int]]], rows: int, max_classes: int = _QUANTILES
) -> list[int]:
    """A padded width for every row of a rollout: the plan with the fewest padded tokens in training.

    Rows of one width form a class. Inside a mini-batch the rows of each class are cut into chunks of exactly `rows`
    rows, filler rows completing the last. More classes pad less but fill up more chunks, so the cost, summed over
    epochs, mini-batches and classes, is ceil(n / rows) * rows * width; the fewest tokens win, then the fewest classes.

    Args: lengths, prompt + completion tokens of each row; mini_batches, for each PPO epoch its mini-batches as lists of
        row indices, exactly those that will run; rows, rows of a chunk; max_classes, the most widths.
    Returns: one width a row, at least its length + 1: with one column of padding in every chunk, attention takes the
        same (masked) kernel in all of them. Deterministic.
    Raises: ValueError when rows or max_classes is below 1.

    >>> plan_widths([3, 3, 9, 9], [[[0, 1, 2, 3]]], rows=2)
    [4, 4, 10, 10]
    >>> plan_widths([3, 9], [[[0, 1]]], rows=2)  # two classes would need two chunks
    [10, 10]
    """
    if rows < 1 or max_classes < 1:
        raise ValueError(f"rows, max_classes: found {rows}, {max_classes}, must be at least 1")
    if not lengths:
        return []
    borders = _quantiles(lengths)
    edges = [0, *borders]  # class (a, b] holds the rows with edges[a] < length <= edges[b]
    shorter = [
        [0, *(bisect_right(batch_lengths, border) for border in borders)]
        for epoch in mini_batches
        for batch_lengths in (sorted(lengths[i] for i in batch) for batch in epoch)
    ]

    def class_cost(low: int, high: int) -> int:
        chunks = sum(-(-(counts[high] - counts[low]) // rows) for counts in shorter)
        return chunks * rows * (edges[high] + 1)

    last = len(borders)
    # The cheapest plans of 1, 2, ... classes for the rows up to each border, as (cost, edges).
    plans = {high: (class_cost(0, high), (0, high)) for high in range(1, last + 1)}
    best = plans[last]
    for classes in range(2, min(max_classes, last) + 1):
        plans = {
            high: min(
                (plans[low][0] + class_cost(low, high), (*plans[low][1], high)) for low in range(classes - 1, high)
            )
            for high in range(classes, last + 1)
        }
        best = min(best, plans[last], key=lambda plan: plan[0])  # the first of equals: the fewest classes
    tops = [edges[i] for i in best[1][1:]]
    return [next(top for top in tops if length <= top) + 1 for length in lengths]


def group_rows(indices: list[int], widths: list[int], lengths: list[int], rows: int) -> list[tuple[int, list[int]]]:
    """The chunks of one mini-batch: (width, row indices), at most `rows` rows each, narrow ones first.

    Args: indices, the rows of the mini-batch; widths and lengths of all rows of the rollout; rows, rows of a chunk.
    Returns: every index once; inside a class rows go by length, equal ones by index, whatever the order of indices.

    >>> group_rows([3, 0, 2, 1], widths=[4, 4, 10, 4], lengths=[3, 2, 9, 1], rows=2)
    [(4, [3, 1]), (4, [0]), (10, [2])]
    """
    chunks = []
    for width in sorted({widths[i] for i in indices}):
        members = sorted((i for i in indices if widths[i] == width), key=lambda i: (lengths[i], i))
        chunks += [(width, members[start : start + rows]) for start in range(0, len(members), rows)]
    return chunks


def equal_chunk_rows(total: int, most: int) -> int:
    """Rows of a chunk when `total` rows go into as few chunks as hold at most `most`, all of one size.

    The last chunk lacks fewer rows than there are chunks. At least 1, also for no rows at all.

    >>> equal_chunk_rows(10, 4)  # 3 chunks of 4, not 4 + 4 + 2
    4
    >>> equal_chunk_rows(9, 8)
    5
    """
    chunks = max(1, -(-total // most))
    return max(1, -(-total // chunks))


def projected_dim(shape: tuple[int, int], side: str, in_dim: int = 1) -> int:
    """The dimension of a weight whose size the projection shrinks to the rank.

    Args: shape of the weight; side, `in` (the layer's input), `out`, `short` or `long`; in_dim, the dimension that
        holds the layer's input, 1 for torch's Linear, 0 for GPT-2's Conv1D. Square matrices count as short = long = in.

    >>> projected_dim((1536, 576), "in"), projected_dim((1536, 576), "long"), projected_dim((576, 1536), "in", in_dim=0)
    (1, 0, 0)
    """
    if side in ("in", "out"):
        return in_dim if side == "in" else 1 - in_dim
    if shape[0] == shape[1]:
        return in_dim
    return int((shape[1] < shape[0]) == (side == "short"))


class LowRankShape(NamedTuple):
    """Sizes of one projected matrix: `basis (d, r)`, moments and accumulator `(r, n)`."""

    d: int
    n: int
    rank: int


def low_rank_shape(shape: tuple[int, int], rank: int, side: str = "in", in_dim: int = 1) -> LowRankShape:
    """Sizes for a weight; the rank is cut to what the matrix has.

    >>> low_rank_shape((1536, 576), 64)
    LowRankShape(d=576, n=1536, rank=64)
    """
    dim = projected_dim(shape, side, in_dim)
    return LowRankShape(shape[dim], shape[1 - dim], min(rank, *shape))


def saves_memory(sizes: LowRankShape) -> bool:
    """Whether basis, moments and accumulator are fewer numbers than the gradient and moments that they replace, and the
    rank is below the matrix's own.

    >>> saves_memory(LowRankShape(576, 1536, 64)), saves_memory(LowRankShape(576, 4, 4))
    (True, False)
    """
    d, n, rank = sizes
    return rank < min(d, n) and rank * (d + 3 * n) < 3 * d * n


def recommended_rank(d: int, cap: int = 128) -> int:
    """The square-root rule: 0.15 sqrt(d), up to a multiple of 8, at most `cap`. d is hidden size times layers.

    >>> recommended_rank(4096 * 32), recommended_rank(8192 * 80), recommended_rank(8192 * 80, cap=64)
    (56, 128, 64)
    """
    return min(cap, round_up(math.ceil(0.15 * math.sqrt(d)), 8))


def tanh_rank(step: int, base: int, delta: int, tau: float) -> int:
    """The schedule base + ceil(delta tanh(step / tau)): from base to base + delta.

    >>> [tanh_rank(step, base=32, delta=64, tau=1000.0) for step in (0, 1, 1000, 100_000)]
    [32, 33, 81, 96]
    """
    return base + math.ceil(delta * math.tanh(step / tau))


def refresh_due(step: int, index: int, gap: int, steps_per_rollout: int = 1) -> bool:
    """Whether matrix `index` renews its basis in optimizer step `step` (the first is 0).

    Every `gap` steps or so, in the last step of a rollout only, and matrix after matrix so that no step renews them
    all. Gap 0: never. The first basis, in step 0, is not decided here.

    >>> [step for step in range(1, 9) if refresh_due(step, index=1, gap=4)]
    [1, 5]
    >>> [step for step in range(1, 17) if refresh_due(step, index=1, gap=8, steps_per_rollout=4)]
    [7, 15]
    """
    if gap == 0 or (step + 1) % steps_per_rollout:
        return False
    period = max(1, round(gap / steps_per_rollout))
    return step // steps_per_rollout % period == index % period


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number.

    >>> round_up(54, 8), round_up(56, 8)
    (56, 56)
    """
    return -(-number // multiple) * multiple


def storage_bytes(elements: int, kind: str) -> int:
    """Bytes of a tensor stored as `kind`, one of `STORAGE`, scales included.

    >>> storage_bytes(1000, "bf16"), storage_bytes(1000, "fp8")  # 8 blocks of 128, padded
    (2000, 1056)
    """
    bits, block = STORAGE[kind]
    if not block:
        return elements * bits // 8
    blocks = -(-elements // block)
    return blocks * block * bits // 8 + 4 * blocks


def low_rank_bytes(sizes: LowRankShape, basis: str = "bf16", moments: str = "8bit", accumulator: str = "fp32") -> int:
    """Bytes of gradient and optimizer state of one projected matrix; each part by its storage kind.

    The accumulator stands for the gradient. Row masses (8 bytes a row) are counted; the few columns of the norm's
    sketch and the gradients that backward holds for a moment are not.

    >>> low_rank_bytes(LowRankShape(576, 1536, 64), accumulator="bf16")
    470528
    """
    d, n, rank = sizes
    return (
        storage_bytes(d * rank, basis)
        + 2 * storage_bytes(rank * n, moments)
        + storage_bytes(rank * n, accumulator)
        + 8 * rank
    )


def adamw_bytes(elements: int, gradient: str = "bf16", moments: str = "bf16") -> int:
    """Bytes of gradient and both Adam moments of so many weights.

    >>> adamw_bytes(1000), adamw_bytes(1000, moments="fp32")
    (6000, 10000)
    """
    return storage_bytes(elements, gradient) + 2 * storage_bytes(elements, moments)


def decoder_matrices(
    hidden: int, intermediate: int, layers: int, key_value: int, vocabulary: int, tied: bool
) -> Iterable[tuple[str, tuple[int, int]]]:
    """Names and shapes (out, in) of the matrices of a Llama-like decoder; `key_value` is the width of k and v.

    >>> shapes = dict(decoder_matrices(576, 1536, 30, 192, 49152, tied=True))
    >>> len(shapes), shapes["layers.0.k_proj"], sum(out * into for out, into in shapes.values())
    (211, (192, 576), 134479872)
    """
    layer = {
        "q_proj": (hidden, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    yield "embed_tokens", (vocabulary, hidden)
    for number in range(layers):
        for name, shape in layer.items():
            yield f"layers.{number}.{name}", shape
    if not tied:
        yield "lm_head", (vocabulary, hidden)


def _quantiles(lengths: list[int]) -> list[int]:
    """The distinct lengths at the candidate quantiles, ascending; the greatest length is the last."""
    ordered = sorted(lengths)
    return sorted({ordered[-(-len(ordered) * k // _QUANTILES) - 1] for k in range(1, _QUANTILES + 1)})
