"""Off-policy correction against exact expectations on toys small enough to enumerate."""

from __future__ import annotations

import pytest
import torch

from trl_alpharl.functional.advantages import compute_gae
from trl_alpharl.functional.losses import clipped_surrogate_loss
from trl_alpharl.functional.off_policy import importance_weights, vtrace_targets


def random_batch(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, old, mu = (torch.randn(4, 6, generator=generator) for _ in range(4))
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [0]])
    return rewards, values, -old.abs(), -mu.abs(), mask


class TestImportanceWeights:
    def test_by_hand(self):
        _, _, old, mu, mask = random_batch()
        weights = importance_weights(old, mu, mask, largest=1.5)
        expected = torch.minimum((old - mu).exp(), torch.tensor(1.5)) * mask
        torch.testing.assert_close(weights, expected)

    def test_on_policy_they_are_exactly_one(self):
        _, _, old, _, mask = random_batch()
        assert torch.equal(importance_weights(old, old, mask, largest=1.0), mask.float())

    def test_padding_may_hold_anything(self):
        _, _, old, mu, mask = random_batch()
        dirty = importance_weights(old.masked_fill(~mask, 1e4), mu.masked_fill(~mask, float("nan")), mask, 2.0)
        assert torch.equal(dirty, importance_weights(old, mu, mask, 2.0))


class TestVtrace:
    @pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
    def test_on_policy_targets_are_gae_returns(self, lam):
        rewards, values, _, _, mask = random_batch()
        one = torch.ones(4, 6)
        found = vtrace_targets(rewards, values, mask, one, one, 0.9, lam)
        torch.testing.assert_close(found, compute_gae(rewards, values, mask, 0.9, lam)[1])

    def test_equal_the_paper_s_sum(self):
        """Equation 1: v_s = V_s + sum over t of gamma^(t-s) (product of c_i, s <= i < t) delta_t."""
        rewards, values, old, mu, mask = random_batch(1)
        rho, cut = importance_weights(old, mu, mask, 2.0), importance_weights(old, mu, mask, 1.0)
        found = vtrace_targets(rewards, values, mask, rho, cut, 0.9, 0.8)
        for row, length in enumerate(mask.sum(1).tolist()):
            v = [*values[row, :length].tolist(), 0.0]
            delta = [float(rho[row, t]) * (float(rewards[row, t]) + 0.9 * v[t + 1] - v[t]) for t in range(length)]
            for s in range(length):
                total, product = v[s], 1.0
                for t in range(s, length):
                    total += 0.9 ** (t - s) * product * delta[t]
                    product *= 0.8 * float(cut[row, t])
                assert float(found[row, s]) == pytest.approx(total, abs=1e-5)
        assert (found[~mask] == 0).all()

    def test_targets_of_the_target_policy_s_value_do_not_move_it(self):
        """Exact expectation over mu on a two-token vocabulary, two steps: V of pi is the fixed point."""
        pi, mu, gamma = torch.tensor([0.8, 0.2]), torch.tensor([0.3, 0.7]), 0.9
        reward = torch.tensor([[1.0, -2.0], [0.5, 3.0]])  # (step, token)
        last = float((pi * reward[1]).sum())
        first = float((pi * reward[0]).sum()) + gamma * last
        paths = [(a, b) for a in (0, 1) for b in (0, 1)]
        rewards = torch.tensor([[reward[0][a], reward[1][b]] for a, b in paths])
        tokens = torch.tensor(paths)
        rho = importance_weights(pi.log()[tokens], mu.log()[tokens], torch.ones(4, 2, dtype=torch.bool), 10.0)
        values = torch.tensor([[first, last]]).expand(4, 2)
        targets = vtrace_targets(rewards, values, torch.ones(4, 2, dtype=torch.bool), rho, rho, gamma, 1.0)
        weights = mu[tokens[:, 0]] * mu[tokens[:, 1]]
        assert float((weights * targets[:, 0]).sum()) == pytest.approx(first, abs=1e-5)


class TestPolicyGradient:
    """A bandit over a vocabulary of two tokens: the mean gradient under mu is the exact policy gradient under pi."""

    rewards = torch.tensor([2.0, -0.5])
    mu = torch.tensor([0.25, 0.75], dtype=torch.float64)

    def exact_gradient(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone().requires_grad_()
        (-(logits.softmax(0) * self.rewards).sum()).backward()
        return logits.grad

    def sampled_gradient(self, logits, behavior, tokens, rho_max=10.0):
        logits = logits.clone().requires_grad_()
        logps = logits.log_softmax(0)[tokens].unsqueeze(1)
        old = logps.detach()
        mask = torch.ones_like(old, dtype=torch.bool)
        weights = importance_weights(old, behavior.log()[tokens].unsqueeze(1), mask, rho_max)
        advantages = self.rewards[tokens].unsqueeze(1)
        clipped_surrogate_loss(logps, old, advantages, mask, 0.2, 0.2, len(tokens), weights).loss.backward()
        return logits.grad

    def test_mean_over_samples_equals_the_exact_gradient_to_sampling_error(self):
        logits = torch.tensor([0.7, 0.0], dtype=torch.float64)
        tokens = torch.multinomial(self.mu, 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
        found, exact = self.sampled_gradient(logits, self.mu, tokens), self.exact_gradient(logits)
        # One sample's gradient is rho A (e_token - pi); its deviation bounds the error of the mean.
        pi = logits.softmax(0)
        each = (pi / self.mu * self.rewards)[tokens] * ((tokens == 0).double() - pi[0])
        error = float(each.std() / len(tokens) ** 0.5)
        assert abs(float(found[0] - exact[0])) < 4 * error
        assert error < 0.01 * abs(float(exact[0]))
        uncorrected = self.sampled_gradient(logits, pi, tokens)  # the same samples, taken for the policy's own
        assert abs(float(uncorrected[0] - exact[0])) > 20 * error

    def test_the_expectation_is_exact(self):
        """Every token as often as mu draws it: 1 : 3."""
        logits = torch.tensor([0.7, 0.0], dtype=torch.float64)
        found = self.sampled_gradient(logits, self.mu, torch.tensor([0, 1, 1, 1]))
        torch.testing.assert_close(found, self.exact_gradient(logits), rtol=1e-5, atol=1e-7)

    def test_with_mu_equal_pi_nothing_changes(self):
        logits = torch.tensor([0.7, 0.0], dtype=torch.float64)
        tokens = torch.tensor([0, 1, 1, 0, 1])
        plain = self.sampled_gradient(logits, logits.softmax(0), tokens, rho_max=1.0)
        logps = logits.clone().requires_grad_()
        chosen = logps.log_softmax(0)[tokens].unsqueeze(1)
        mask = torch.ones(5, 1, dtype=torch.bool)
        advantages = self.rewards[tokens].unsqueeze(1)
        clipped_surrogate_loss(chosen, chosen.detach(), advantages, mask, 0.2, 0.2, 5).loss.backward()
        torch.testing.assert_close(plain, logps.grad, rtol=0, atol=1e-12)
