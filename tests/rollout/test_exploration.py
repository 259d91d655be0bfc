"""Exploration: the recorded log-probs are those of the distribution that was sampled from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.rollout.exploration import Exploration, behavior_or_own, norm_weights
from trl_alpharl.rollout.sampler import Sampling, sample

PROMPTS = [[5, 9], [7, 8, 11, 30], [4], [60, 3, 2]]
SAMPLING = Sampling(response_length=6, temperature=0.7, stop_ids=(1,), pad_id=0, chunk_rows=2)


def explore(roles, exploration, sampling=SAMPLING, seed=3, prompts=PROMPTS):
    return sample(roles, prompts, [{}] * len(prompts), 0, sampling, seed, exploration)


def policy_log_probs(model, rollout, row, temperature):
    """One row without padding, (C, V)."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    answer = rollout.completion_ids[row][rollout.completion_mask[row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1), answer


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, stop_ids=()), replace(SAMPLING, chunk_rows=1)])
def test_epsilon_s_log_probs_equal_a_plain_forward(model, sampling):
    rollout = explore(ActorCritic(model), Exploration(epsilon=0.3), sampling)
    for row in range(4):
        log_pi, answer = policy_log_probs(model, rollout, row, 0.7)
        mu = 0.7 * log_pi.gather(1, answer[:, None])[:, 0].exp() + 0.3 / 64
        torch.testing.assert_close(rollout.behavior_logps[row][: len(answer)].exp(), mu, rtol=1e-4, atol=1e-7)
    assert rollout.behavior_logps[~rollout.completion_mask].abs().sum() == 0


def test_no_exploration_amount_is_the_policy(model):
    """All amounts 0: the plain draw, token for token, and the policy's own log-probs."""
    roles = ActorCritic(model)
    plain, recorded = explore(roles, None), explore(roles, Exploration())
    assert torch.equal(plain.completion_ids, recorded.completion_ids)
    assert plain.behavior_logps is None
    for row in range(4):
        log_pi, answer = policy_log_probs(model, recorded, row, 0.7)
        own = log_pi.gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(recorded.behavior_logps[row][: len(answer)], own, atol=1e-5, rtol=0)


def test_logit_noise_is_one_draw_a_completion(model):
    """With the same context at every step (a model of zeros) the log-prob of a token is the same at every step."""
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    rollout = explore(
        ActorCritic(model), Exploration(logit_noise=2.0), replace(SAMPLING, response_length=40, stop_ids=())
    )
    seen: list[dict[int, float]] = []
    for ids, logps in zip(rollout.completion_ids.tolist(), rollout.behavior_logps.tolist()):
        by_token = dict(zip(ids, logps))
        assert all(by_token[token] == pytest.approx(logp, abs=1e-6) for token, logp in zip(ids, logps))
        seen.append(by_token)
    shared = set(seen[0]) & set(seen[1])
    assert shared and all(abs(seen[0][token] - seen[1][token]) > 1e-3 for token in shared)  # rows differ


def test_samples_follow_the_recorded_distribution(model):
    """First tokens of 3000 completions against mu: a chi-square of 63 degrees of freedom stays below 120."""
    roles = ActorCritic(model)
    sampling = replace(SAMPLING, response_length=1, chunk_rows=3000)
    rollout = explore(roles, Exploration(epsilon=0.5), sampling, prompts=[[5, 9]] * 3000)
    mu = {}
    for token, logp in zip(rollout.completion_ids[:, 0].tolist(), rollout.behavior_logps[:, 0].tolist()):
        mu[token] = torch.tensor(logp).exp().item()
    counts = Counter(rollout.completion_ids[:, 0].tolist())
    chi_square = sum((counts[token] - 3000 * p) ** 2 / (3000 * p) for token, p in mu.items())
    assert len(mu) == 64 and sum(mu.values()) == pytest.approx(1, abs=1e-3)
    assert chi_square < 120


class TestNormNoise:
    def test_weights_come_back_bit_for_bit_also_after_an_error(self, model):
        roles = ActorCritic(model)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        explore(roles, Exploration(norm_noise=0.1))
        with pytest.raises(RuntimeError), Exploration(norm_noise=0.1).perturbed(model):
            assert not torch.equal(model.model.norm.weight, before["model.norm.weight"])
            raise RuntimeError
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert len(norm_weights(model)) == 5 and all(weight.requires_grad for weight in norm_weights(model))

    def test_the_log_probs_are_the_noisy_model_s(self, model):
        roles = ActorCritic(model)
        noisy = Exploration(norm_noise=0.3)
        rollout = explore(roles, noisy)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            with noisy.perturbed(model):
                expected = [policy_log_probs(model, rollout, row, 0.7) for row in range(4)]
        for row, (log_mu, answer) in enumerate(expected):
            found = rollout.behavior_logps[row][: len(answer)]
            torch.testing.assert_close(found, log_mu.gather(1, answer[:, None])[:, 0], atol=1e-5, rtol=0)
            own = policy_log_probs(model, rollout, row, 0.7)[0].gather(1, answer[:, None])[:, 0]
            assert (found - own).abs().max() > 1e-3

    def test_a_model_without_rms_norms_is_refused(self):
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
        with pytest.raises(ValueError, match="norm_noise: the model has no RMSNorm layers"):
            norm_weights(gpt2)


def test_active_tells_whether_anything_differs():
    assert not Exploration(epsilon_top_p=0.5).active
    assert all(Exploration(**{name: 0.1}).active for name in ("logit_noise", "epsilon", "norm_noise"))


def test_behavior_or_own():
    own = torch.tensor([[-1.0, -2.0]])
    assert behavior_or_own(None, own) is own
    assert behavior_or_own(torch.tensor([[float("nan"), -5.0]]), own).tolist() == [[-1.0, -5.0]]
