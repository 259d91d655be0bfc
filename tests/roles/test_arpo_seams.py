"""What ARPO asks of the actor-critic: the gradient at the head's input, and a value head with a bias."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trl_alpharl.functional.logps import logps_and_entropy
from trl_alpharl.roles.actor_critic import ActorCritic

IDS = torch.tensor([[5, 9, 11, 30, 7, 2, 40, 0], [8, 3, 60, 21, 9, 0, 0, 0]])
MASK = (IDS > 0).long()
PREDICT_AT = torch.tensor([[2, 3, 4, 5], [1, 2, 3, 4]])


def tokens() -> dict[str, torch.Tensor]:
    return {
        "input_ids": IDS,
        "attention_mask": MASK,
        "position_ids": torch.arange(8).expand(2, 8),
        "predict_at": PREDICT_AT,
        "completion_ids": IDS.gather(1, PREDICT_AT + 1),
    }


def test_the_gradient_at_the_head_s_input_is_the_policy_s_alone(model):
    """Against the same gradient taken by hand: hidden states as a leaf, through the head only."""
    roles = ActorCritic(model)
    nn.init.ones_(roles.value_head.weight)
    roles.watch_head_gradient = True
    stats = roles(**tokens())
    squares = roles.head_gradient
    assert squares == 0
    (stats.per_token_logps.sum() + 100 * stats.values.square().sum()).backward()
    hidden = model.model(IDS, attention_mask=MASK).last_hidden_state
    leaf = hidden.gather(1, PREDICT_AT.unsqueeze(-1).expand(-1, -1, 64)).flatten(0, 1).detach().requires_grad_()
    logps_and_entropy(model.lm_head(leaf), tokens()["completion_ids"].flatten())[0].sum().backward()
    assert squares.item() == pytest.approx(leaf.grad.square().sum().item(), rel=1e-4)
    with torch.no_grad():
        roles(**tokens())
    assert roles.head_gradient is squares


def test_watching_changes_no_gradient(model):
    gradients = []
    for watch in (False, True):
        roles = ActorCritic(copy.deepcopy(model))
        roles.watch_head_gradient = watch
        stats = roles(**tokens())
        (stats.per_token_logps.sum() + stats.values.sum()).backward()
        gradients.append([p.grad.clone() for p in roles.policy.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_value_bias_starts_at_zero_learns_and_belongs_to_the_critic(model, classifier):
    roles = ActorCritic(model)
    roles.add_value_bias()
    assert any(parameter is roles.value_head.bias for parameter in roles.critic_parameters())
    values = roles(**tokens()).values
    assert values.abs().sum() == 0
    values.sum().backward()
    assert roles.value_head.bias.grad.item() == 8
    with pytest.raises(ValueError, match="popart: it rescales a value head; value_model has its own"):
        ActorCritic(copy.deepcopy(model), value_model=classifier).add_value_bias()
