"""Against torch's Adam, against the definition of a running mean over seen gradients, and under changes of basis."""

import pytest
import torch

from trl_alpharl.functional.moments import (
    Moments,
    adam_direction,
    channel_scales,
    empty_moments,
    resize_moments,
    transport_moments,
    update_moments,
)

BETAS = (0.9, 0.99)


def orthonormal(d: int, r: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, r, generator=torch.Generator().manual_seed(seed)))[0]


def gradients(count: int, rows: int = 4, columns: int = 7, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, generator=g) for _ in range(count)]


def after(grads, rows: int = 4) -> Moments:
    moments = empty_moments(rows, grads[0].shape[1])
    for gradient in grads:
        moments = update_moments(moments, gradient, BETAS)
    return moments


def test_in_a_fixed_basis_it_is_torch_s_adam():
    weight = torch.nn.Parameter(torch.zeros(4, 7))
    adam = torch.optim.Adam([weight], lr=1.0, betas=BETAS, eps=1e-3)
    moments = empty_moments(4, 7)
    for gradient in gradients(5):
        before = weight.detach().clone()
        weight.grad = gradient
        adam.step()
        moments = update_moments(moments, gradient, BETAS)
        torch.testing.assert_close(adam_direction(moments, 1e-3), before - weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_rotation_within_the_same_subspace_moves_the_mean_as_a_vector():
    old, moments = orthonormal(9, 4, 0), after(gradients(5))
    rotation = orthonormal(4, 4, 1)
    new = old @ rotation.T
    moved = transport_moments(moments, new.T @ old)
    torch.testing.assert_close(new @ moved.mean, old @ moments.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moved.mean_mass, moments.mean_mass)
    torch.testing.assert_close(moved.square.sum(), moments.square.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [2, 4, 6])
def test_a_constant_gradient_keeps_its_momentum_when_the_rank_changes(rank):
    old = orthonormal(9, 4, 0)
    new = torch.cat([old, orthonormal(9, 9, 2)], dim=1)
    new = torch.linalg.qr(new)[0][:, :rank]  # the old directions and more, or the first of them
    gradient = old[:, :2] @ torch.randn(2, 7, generator=torch.Generator().manual_seed(3))  # in every of the three
    moments = after([old.T @ gradient] * 8)
    moved = transport_moments(moments, new.T @ old)
    mean = moved.mean * torch.where(moved.mean_mass > 1e-6, 1 / moved.mean_mass, 0.0)[:, None]
    torch.testing.assert_close(new @ mean, gradient, rtol=1e-4, atol=1e-5)
    square = moved.square * torch.where(moved.square_mass > 1e-6, 1 / moved.square_mass, 0.0)[:, None]
    torch.testing.assert_close(square, (new.T @ gradient).square(), rtol=1e-3, atol=1e-5)


def test_directions_that_were_not_seen_start_without_mass_and_are_full_after_one_gradient():
    old = torch.eye(6)[:, :2]
    new = torch.eye(6)[:, 1:4]
    moved = transport_moments(after(gradients(50, rows=2), rows=2), new.T @ old)
    assert moved.mean_mass.tolist() == pytest.approx([1 - 0.9**50, 0, 0], abs=1e-6)
    assert moved.mean[1:].abs().max() == 0
    (gradient,) = gradients(1, rows=3, seed=5)
    fresh = adam_direction(update_moments(moved, gradient, BETAS), eps=0.0)
    torch.testing.assert_close(fresh[1:], gradient[1:].sign(), rtol=1e-5, atol=1e-5)


def test_second_moments_stay_above_squared_means_under_any_change():
    moments = after(gradients(9))
    for seed in range(5):
        change = orthonormal(9, 6, seed).T @ orthonormal(9, 4, seed + 50)
        moved = transport_moments(moments, change)
        mean = moved.mean / moved.mean_mass[:, None]
        assert (moved.square / moved.square_mass[:, None] - mean.square()).min() > -1e-5
        assert (moved.mean_mass >= 0).all() and (moved.mean_mass <= moments.mean_mass.max() + 1e-6).all()


def test_variance_moves_as_that_of_independent_coordinates():
    noise = torch.randn(4000, 4, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2, 3, 4])[:, None]
    rotation = orthonormal(4, 4, 8)
    exact = (rotation @ noise).square().mean(0)
    moments = Moments(torch.zeros(4, 1), noise.square().mean(0), torch.ones(4), torch.ones(4))
    torch.testing.assert_close(transport_moments(moments, rotation).square, exact, rtol=0.1, atol=0.1)


def test_resizing_keeps_rows_where_they_were():
    moments = after(gradients(3))
    assert torch.equal(resize_moments(moments, 2).mean, moments.mean[:2])
    grown = resize_moments(moments, 6)
    assert torch.equal(grown.mean[:4], moments.mean) and grown.square_mass[4:].tolist() == [0, 0]


def test_channel_scales_stretch_each_channel_to_adam_s_length():
    gradient, direction = gradients(2)
    scales = channel_scales(gradient, direction)
    torch.testing.assert_close((gradient * scales).norm(dim=0), direction.norm(dim=0))
