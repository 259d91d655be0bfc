"""Contract tests of every method in the table, and their error on the spectra of real gradients."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trl_alpharl.functional.subspace import (
    SUBSPACE_METHODS,
    energy_rank,
    find_basis,
    leading_directions,
    low_rank_approximate,
    project,
    project_back,
    see,
)

SPECTRA = json.loads((Path(__file__).parents[1] / "data/gradient_spectra.json").read_text())["spectra"]
EVERY = pytest.mark.parametrize("method", SUBSPACE_METHODS)
FROM_GRADIENT = pytest.mark.parametrize("method", ["power", "rsvd", "svd", "column_sampled"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values, d: int, n: int, seed: int = 0) -> torch.Tensor:
    """A matrix (d, n) with these singular values and random directions."""
    g = generator(seed)
    left = torch.linalg.qr(torch.randn(d, len(values), generator=g))[0]
    right = torch.linalg.qr(torch.randn(n, len(values), generator=g))[0]
    return left * torch.tensor(values) @ right.T


def real(spectrum: dict, seed: int = 0) -> torch.Tensor:
    """A matrix with a real gradient's spectrum, its input side first."""
    out, into = spectrum["shape"]
    return with_spectrum(spectrum["singular_values"], into, out, seed)


def excess(basis: torch.Tensor, matrix: torch.Tensor, values, rank: int) -> float:
    """How far the error is above that of the best rank-r approximation; 0.02 is 2 %."""
    matrix, basis = matrix.double(), basis.double()
    error = (matrix - basis @ (basis.T @ matrix)).norm()
    best = np.sqrt(np.square(values[rank:]).sum())
    return float(error) / best - 1


@EVERY
@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(24, 40, generator=generator(1)),
        torch.randn(40, 24, generator=generator(1)) * 1e4,
        torch.zeros(24, 40),
        torch.ones(24, 40),
        torch.randn(24, 3, generator=generator(1)) * 1e-20,
        torch.eye(24, 40),
    ],
    ids=["wide", "tall and large", "zero", "rank 1", "fewer columns than the rank, tiny", "identity"],
)
def test_a_basis_is_orthonormal_whatever_the_matrix_holds(method, matrix):
    basis = find_basis(method, matrix, 8, generator())
    assert basis.shape == (len(matrix), 8) and basis.dtype == torch.float32
    assert (basis.T @ basis - torch.eye(8)).abs().max() < 1e-5


@EVERY
def test_a_basis_depends_on_matrix_and_seed_alone(method):
    matrix = torch.randn(24, 40, generator=generator(1))
    first, again = (find_basis(method, matrix, 8, generator(3)) for _ in range(2))
    assert torch.equal(first, again)


@EVERY
def test_the_rank_is_cut_to_the_rows(method):
    basis = find_basis(method, torch.randn(6, 40, generator=generator(1)), 64, generator())
    assert basis.shape == (6, 6)
    assert (basis.T @ basis - torch.eye(6)).abs().max() < 1e-5


@EVERY
def test_what_is_seen_of_parts_adds_up_to_what_is_seen_of_the_sum(method):
    parts = [torch.randn(24, 40, generator=generator(seed)) for seed in range(3)]
    rows = torch.randn(8, 40, generator=generator(9))
    looks = [SUBSPACE_METHODS[method].look(40, 8, generator(5), rows) for _ in parts]  # one made anew for each part
    seen = sum(see(part, look) for part, look in zip(parts, looks))
    whole = see(sum(parts), looks[0])
    torch.testing.assert_close(seen, whole, rtol=1e-5, atol=1e-5)
    chosen = SUBSPACE_METHODS[method]
    bases = [chosen.find(what, 8, generator(6)) for what in (seen, whole)]
    overlap = torch.linalg.svdvals(bases[0].T @ bases[1])
    assert overlap.min() > 0.999


@FROM_GRADIENT
def test_a_matrix_of_low_rank_is_recovered(method):
    values = [5.0, 3.0, 2.0, 1.0]
    matrix = with_spectrum(values, 48, 96)
    basis = find_basis(method, matrix, 4, generator())
    assert (project_back(basis, project(basis, matrix)) - matrix).norm() < 1e-4 * matrix.norm()


@FROM_GRADIENT
def test_leading_directions_come_first(method):
    matrix = with_spectrum([8.0, 4.0, 2.0, 1.0, 0.5], 48, 96)
    energies = project(find_basis(method, matrix, 5, generator()), matrix).square().sum(1)
    assert energies.tolist() == pytest.approx([64, 16, 4, 1, 0.25], rel=0.6)
    assert torch.equal(energies.sort(descending=True).values, energies)


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("spectrum", SPECTRA, ids=lambda s: f"{s['gradient']} {s['matrix']}")
def test_rsvd_is_within_two_percent_of_the_optimum_on_real_spectra(spectrum, rank):
    values = spectrum["singular_values"]
    if rank >= len(values):
        pytest.skip("the matrix is smaller")
    for seed in range(2):
        matrix = real(spectrum, seed)
        assert excess(find_basis("rsvd", matrix, rank, generator(seed)), matrix, values, rank) < 0.02


@pytest.mark.parametrize("spectrum", SPECTRA[:3], ids=lambda s: f"{s['gradient']} {s['matrix']}")
def test_the_exact_method_is_exact_and_the_others_stand_in_their_order(spectrum):
    matrix, values, rank = real(spectrum), spectrum["singular_values"], 32
    kept = {name: project(find_basis(name, matrix, rank, generator()), matrix).norm() ** 2 for name in SUBSPACE_METHODS}
    best = np.square(values[:rank]).sum()
    assert excess(find_basis("svd", matrix, rank, generator()), matrix, values, rank) == pytest.approx(0, abs=1e-5)
    assert kept["rsvd"] > 0.995 * best
    assert kept["column_sampled"] > 0.9 * best
    assert kept["power"] > 0.8 * best  # one pass, cold
    assert kept["random"] == pytest.approx(rank / len(matrix), rel=0.5)  # of a unit norm
    assert kept["masked"] < kept["column_sampled"]


def test_power_iterates_from_what_the_present_basis_sees():
    spectrum = SPECTRA[0]
    matrix, values, rank = real(spectrum), spectrum["singular_values"], 64
    cold = find_basis("power", matrix, rank, generator(1))
    warm = find_basis("power", matrix, rank, generator(1), rows=project(cold, matrix))
    again = find_basis("power", matrix, rank, generator(1), rows=project(warm, matrix))
    errors = [excess(basis, matrix, values, rank) for basis in (cold, warm, again)]
    assert errors[0] > 2 * errors[1] > 2 * errors[2]
    assert errors[2] < 0.05


def test_power_grows_and_shrinks_from_rows_of_another_rank():
    matrix = real(SPECTRA[0])
    few = project(find_basis("svd", matrix, 16, generator()), matrix)
    grown = find_basis("power", matrix, 32, generator(), rows=few)
    shrunk = find_basis("power", matrix, 8, generator(), rows=few)
    best = np.square(SPECTRA[0]["singular_values"])
    assert project(grown, matrix).norm() ** 2 > best[:16].sum()
    assert project(shrunk, matrix).norm() ** 2 > 0.97 * best[:8].sum()


def test_power_without_momentum_yet_looks_at_random():
    basis = find_basis("power", torch.randn(24, 40, generator=generator(1)), 8, generator(), rows=torch.zeros(8, 40))
    assert (basis.T @ basis - torch.eye(8)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_low_rank_approximate_is_the_truncated_svd(shape):
    matrix = torch.randn(*shape, generator=generator(2)).double()
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5]
    assert np.abs(low_rank_approximate(matrix, 5, method="svd").numpy() - best).max() < 1e-5
    near = low_rank_approximate(matrix.to(torch.bfloat16), 5)
    assert near.dtype == torch.bfloat16 and near.shape == shape


def test_leading_directions_fill_up_when_little_was_seen():
    basis = leading_directions(torch.tensor([[2.0], [0.0], [0.0]]), 2, generator())
    assert basis[:, 0].abs().tolist() == [1.0, 0.0, 0.0]
    assert (basis.T @ basis - torch.eye(2)).abs().max() < 1e-6


def test_energy_rank_counts_until_the_share_is_held():
    energies = torch.tensor([50.0, 30.0, 15.0])
    assert [energy_rank(energies, torch.tensor(100.0), share) for share in (0.5, 0.51, 0.95, 0.96)] == [1, 2, 3, None]


def test_directions_that_rounding_made_do_not_depend_on_the_rounding():
    matrix = with_spectrum([2.0, 1.0], 24, 40)
    noise = 1e-7 * torch.randn(24, 40, generator=generator(7))
    bases = [leading_directions(m, 6, generator(3)) for m in (matrix, matrix + noise)]
    assert ((bases[0] * bases[1]).sum(0).abs() > 1 - 1e-5).all()
