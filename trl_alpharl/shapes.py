"""Integer rules for shapes: how rows are cut into chunks and how wide those are. Standard library only.

In bf16 a row's log-probs depend on the shape (rows x padded width) of the chunk it runs in. So every row gets one
padded width for its whole rollout, every chunk has the same number of rows, and scoring and training see a row in the
same shape: the first probability ratio is then exactly 1. A few widths (classes) keep short rows from paying for long
ones.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import combinations, pairwise

_QUANTILES = 16  # candidate class borders; more gain little and cost a plan quadratically


def plan_widths(lengths: list[int], mini_batches: list[list[list[int]]], rows: int, max_classes: int = 3) -> list[int]:
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
    costs = {(low, high): class_cost(low, high) for low, high in combinations(range(last + 1), 2)}
    plans = [
        (0, *inner, last) for classes in range(max_classes) for inner in combinations(range(1, last), classes)
    ]  # fewest classes first: min() keeps the first of equals
    best = min(plans, key=lambda plan: sum(costs[step] for step in pairwise(plan)))
    tops = [edges[i] for i in best[1:]]
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


def _quantiles(lengths: list[int]) -> list[int]:
    """The distinct lengths at the candidate quantiles, ascending; the greatest length is the last."""
    ordered = sorted(lengths)
    return sorted({ordered[-(-len(ordered) * k // _QUANTILES) - 1] for k in range(1, _QUANTILES + 1)})
