import pytest
import torch

from trl_alpharl.lowrank.storage import fetch, fetch_moments, seeded_generator, store, store_moments, tensor_bytes
from trl_alpharl.shapes import STORAGE, storage_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", STORAGE)
def test_what_is_stored_comes_back_and_the_kind_travels_with_it(kind):
    tensor = torch.randn(70, 80, generator=torch.Generator().manual_seed(0))
    state: dict = {}
    store(state, "basis", tensor, kind)
    assert state["basis_kind"] == kind and tensor_bytes(state) == storage_bytes(5600, kind)
    near = fetch(state, "basis", (70, 80))
    assert near.dtype == torch.float32 and (near - tensor).norm() < 0.15 * tensor.norm()
    store(state, "basis", tensor, "fp32")  # another kind leaves nothing of the first
    assert set(state) == {"basis", "basis_kind"} and fetch(state, "basis", (70, 80)) is state["basis"]


def test_small_tensors_stay_whole():
    state: dict = {}
    store(state, "mean", torch.randn(63, 65), "8bit")
    assert state["mean_kind"] == "fp32"


@pytest.mark.parametrize("kind", STORAGE)
def test_second_moments_are_kept_as_roots_and_never_as_zero(kind):
    mean = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    square = mean.square() + 1e-12
    state: dict = {}
    store_moments(state, mean, square, kind)
    _, near = fetch_moments(state, (64, 64))
    assert (near > 0).all()
    assert (near.sqrt() - square.sqrt()).norm() < 0.2 * square.sqrt().norm()


def test_generators_depend_on_every_part_and_on_nothing_else():
    def draw(*parts):
        return float(torch.rand(1, generator=seeded_generator(CPU, *parts)))

    assert draw(0, 1, 2, "look") == draw(0, 1, 2, "look")
    assert len({draw(0, 1, 2, "look"), draw(1, 1, 2, "look"), draw(0, 2, 2, "look"), draw(0, 1, 3, "look")}) == 4
    assert draw(0, 1, 2, "look") != draw(0, 1, 2, "find") and draw(1, 12) != draw(11, 2)
