"""Low-rank subspaces of a gradient: methods that find a basis, projection, the rank-r approximation.

A basis is found in two moves, so that a sum of gradients never has to exist as a whole. `look` fixes a linear map of
the matrix's columns before the gradients come; each gradient A (d, n) shows `see(A, look)` (d, s), and these add up
exactly. `find` turns the sum into the basis. Holders of a whole matrix call `find_basis`, which does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SPARE_COLUMNS = 8  # a few columns beyond the rank let a warm basis find new directions
_ROUNDING = 1e-5
SAMPLED = 4  # column sampling and masking keep one in so many


class SubspaceMethod(NamedTuple):
    """Two functions of one signature each.

    look(n, rank, generator, rows): `None` to see the whole matrix, a float test matrix (n, s), or column indices (s,).
        `rows` (r', n), or None, is what the present basis sees of recent gradients; only warm methods use it.
    find(seen, rank, generator): the basis (d, rank), orthonormal columns, leading directions first, whatever `seen`
        (d, s) holds, zeros and dependent columns included.
    """

    look: Callable[[int, int, torch.Generator, Tensor | None], Tensor | None]
    find: Callable[[Tensor, int, torch.Generator], Tensor]


def see(matrix: Tensor, look: Tensor | None) -> Tensor:
    """The part (d, s) of a matrix (d, n) that a look shows; linear in the matrix.

    >>> see(torch.eye(3), torch.tensor([2, 0])).tolist()
    [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    """
    if look is None:
        return matrix
    if not look.is_floating_point():
        return matrix.index_select(1, look)
    return (matrix @ look.to(matrix.dtype)).to(look.dtype)


def find_basis(
    method: str, matrix: Tensor, rank: int, generator: torch.Generator, rows: Tensor | None = None
) -> Tensor:
    """A basis (d, rank) for the columns of a matrix (d, n), in fp32; the rank is cut to d.

    Args: method, a key of SUBSPACE_METHODS; generator, on the matrix's device; rows, see SubspaceMethod.

    >>> matrix = torch.outer(torch.tensor([3.0, 4.0]), torch.ones(5))
    >>> find_basis("svd", matrix, 1, torch.Generator()).abs().flatten().tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    rank = min(rank, matrix.shape[0])
    chosen = SUBSPACE_METHODS[method]
    look = chosen.look(matrix.shape[1], rank, generator, rows)
    return chosen.find(see(matrix.float(), look), rank, generator)


def project(basis: Tensor, matrix: Tensor) -> Tensor:
    """Coordinates (r, n) of the columns of a matrix (d, n) in a basis (d, r).

    >>> project(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[3.0, 4.0]]
    """
    return basis.T @ matrix


def project_back(basis: Tensor, coordinates: Tensor) -> Tensor:
    """The matrix (d, n) whose coordinates (r, n) these are.

    >>> project_back(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[0.0, 0.0], [3.0, 4.0]]
    """
    return basis @ coordinates


def square_sum(tensor: Tensor) -> Tensor:
    """The squared Frobenius norm, in fp32 and without a copy of the tensor.

    >>> float(square_sum(torch.tensor([[3.0, 4.0]])))
    25.0
    """
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()


def low_rank_approximate(
    matrix: Tensor, rank: int, generator: torch.Generator | None = None, method: str = "rsvd"
) -> Tensor:
    """The projection of a matrix (m, n) on `rank` of its leading directions, in its own dtype.

    Works on the shorter side, where it is cheaper and, for the exact method, the same.

    >>> matrix = torch.outer(torch.arange(3.0), torch.arange(5.0))
    >>> bool((low_rank_approximate(matrix, 1) - matrix).norm() < 1e-5)
    True
    """
    if generator is None:
        generator = torch.Generator(matrix.device).manual_seed(0)
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    basis = find_basis(method, short, rank, generator)
    approximation = project_back(basis, project(basis, short.float())).to(matrix.dtype)
    return approximation if short is matrix else approximation.T


def leading_directions(seen: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """The leading left singular vectors (d, rank) of a matrix (d, s), orthonormal whatever it holds.

    By the small Gram matrix in fp64 and a last Householder QR; one-pass Cholesky-QR in fp32 is not safe here (measured:
    up to eleven times the optimal error after a power step). Directions that rounding made, below 1e-5 of the first,
    give way to random ones: else the order in which gradients were summed would choose them.

    >>> leading_directions(torch.tensor([[0.0, 0.0], [0.0, 9.0]]), 1, torch.Generator()).abs().tolist()
    [[0.0], [1.0]]
    """
    found = _principal(seen)[:, :rank]
    if found.shape[1] < rank:
        fill = _gaussian(len(seen), rank - found.shape[1], generator, found)
        found = torch.cat([found, fill], dim=1)
    return torch.linalg.qr(found)[0]


def _principal(matrix: Tensor) -> Tensor:
    """Left singular vectors (d, r), leading first, of a matrix (d, s) without those that rounding made; in fp32 and
    nearly orthonormal, the less the smaller their singular value."""
    wide = matrix.shape[0] < matrix.shape[1]
    factor = matrix.T.double() if wide else matrix.double()
    energies, vectors = torch.linalg.eigh(factor.T @ factor)
    real = (energies > _ROUNDING**2 * energies[-1:]).flip(0)
    energies, vectors = energies.flip(0)[real], vectors.flip(1)[:, real]
    return (vectors if wide else factor @ (vectors / energies.sqrt())).to(matrix.dtype)


def randomized_range(matrix: Tensor, columns: int, generator: torch.Generator, power_iterations: int = 1) -> Tensor:
    """A sketch (d, columns) whose leading left singular vectors are nearly those of the matrix (d, n).

    Randomized range finder with power iterations (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1), stopped at
    A Z with orthonormal Z: that sketch needs no last pass over the matrix.

    >>> generator = torch.Generator().manual_seed(0)
    >>> randomized_range(torch.eye(6), 3, generator).shape
    torch.Size([6, 3])
    """
    columns = min(columns, *matrix.shape)
    sketch = matrix @ _gaussian(matrix.shape[1], columns, generator, matrix)
    for _ in range(power_iterations):
        sketch = matrix @ torch.linalg.qr(matrix.T @ torch.linalg.qr(sketch)[0])[0]
    return sketch


def energy_rank(energies: Tensor, total: Tensor, share: float) -> int | None:
    """How many leading directions hold a share of a squared norm; None when all of them do not.

    Args: energies (r,), squared, in descending order; total, the squared norm of the whole; share in (0, 1].

    >>> energy_rank(torch.tensor([6.0, 3.0, 0.5]), torch.tensor(10.0), 0.9)
    2
    >>> energy_rank(torch.tensor([6.0, 2.0]), torch.tensor(10.0), 0.9)
    """
    enough = (energies.cumsum(0) >= share * total).nonzero()
    return int(enough[0]) + 1 if len(enough) else None


def _look_at_all(n: int, rank: int, generator: torch.Generator, rows: Tensor | None) -> None:
    return None


def _look_at_nothing(n: int, rank: int, generator: torch.Generator, rows: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.long, device=generator.device)


def _look_at_a_sample(n: int, rank: int, generator: torch.Generator, rows: Tensor | None) -> Tensor:
    count = min(n, max(n // SAMPLED, 2 * rank))
    return torch.randperm(n, generator=generator, device=generator.device)[:count]


def _look_along_rows(n: int, rank: int, generator: torch.Generator, rows: Tensor | None) -> Tensor:
    """Warm: the directions (n, rank) of the rows, and spare random ones. Cold: random ones alone."""
    if rows is None:
        return _gaussian(n, rank + SPARE_COLUMNS, generator, None) / n**0.5
    warm = _principal(rows.T)
    spare = max(0, rank - warm.shape[1]) + SPARE_COLUMNS
    return torch.cat([warm, _gaussian(n, spare, generator, None) / n**0.5], dim=1)


def _find_by_range(seen: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    # Half as many columns again: at rank 16, 64 and 128 of real gradients at most 1.8 % above the optimal error.
    return leading_directions(randomized_range(seen, rank + max(16, rank // 2), generator), rank, generator)


def _find_leading(seen: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    return leading_directions(seen, rank, generator)


def _find_random(seen: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(_gaussian(seen.shape[0], rank, generator, seen))[0]


def _find_under_a_mask(seen: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    kept = torch.rand(seen.shape, generator=generator, device=seen.device) < 1 / SAMPLED
    return _find_by_range(seen * kept, rank, generator)


def _gaussian(rows: int, columns: int, generator: torch.Generator, like: Tensor | None) -> Tensor:
    dtype = torch.float32 if like is None else like.dtype
    return torch.randn(rows, columns, generator=generator, device=generator.device, dtype=dtype)


# power: one pass, warm; the optimizer's. rsvd: three passes, within 2 % of the optimum; the callback's. svd: exact, the
# oracle. random: no look at the gradient. column_sampled: a quarter of the columns. masked: a random quarter of the
# entries; it costs more time than rsvd and loses most of the gradient, and is here to be compared.
SUBSPACE_METHODS: dict[str, SubspaceMethod] = {
    "power": SubspaceMethod(_look_along_rows, _find_leading),
    "rsvd": SubspaceMethod(_look_at_all, _find_by_range),
    "svd": SubspaceMethod(_look_at_all, _find_leading),
    "random": SubspaceMethod(_look_at_nothing, _find_random),
    "column_sampled": SubspaceMethod(_look_at_a_sample, _find_by_range),
    "masked": SubspaceMethod(_look_at_all, _find_under_a_mask),
}
