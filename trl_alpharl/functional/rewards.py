"""From one number a completion to one number a token."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import score_positions


def combine_rewards(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of several reward functions, each over the rows it has an opinion on.

    A function that does not apply to a row (TRL's convention: it returns None) neither adds to that row nor counts as
    a reward of 0 in anything that is averaged later.

    Args: rewards (B, F), NaN = no opinion; weights (F,).
    Returns: scores (B,), 0 where no function gave an opinion, and valid (B,) bool, False on those rows.
    Raises: ValueError when there is not one weight a function.

    >>> rewards = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [torch.nan, torch.nan]])
    >>> combine_rewards(rewards, torch.tensor([1.0, 0.5]))
    (tensor([2., 1., 0.]), tensor([ True,  True, False]))
    """
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"reward_weights: found {weights.numel()}, must be one for each of {rewards.shape[1]} rewards")
    opinion = ~rewards.isnan()
    return (rewards.masked_fill(~opinion, 0) * weights).sum(1), opinion.any(1)


def penalize_missing_eos(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Subtract the penalty from the score of every completion that no stop token ended.

    `finished` comes from the sampler: which id ended a completion does not matter here.

    Args: scores (B,), finished (B,) bool, penalty in units of the score.
    Returns: (B,).

    >>> penalize_missing_eos(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), 1.0)
    tensor([2., 1.])
    """
    return torch.where(finished, scores, scores - penalty)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of each token: minus the KL penalty, and on the last token that counts also the completion's score.

    The reward of Ziegler et al. 2019 (arXiv 1909.08593), eq. 2, spread over the tokens.

    Args: scores (B,), kl (B, C) nats, mask (B, C) bool, kl_coef in reward a nat. Padding may hold anything, and so may
        the scores of rows without a token.
    Returns: (B, C), 0 at padding.

    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> token_rewards(torch.tensor([5.0, 7.0]), torch.ones(2, 3), mask, 0.5)
    tensor([[-0.5000,  4.5000,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])
    """
    penalties = (-kl_coef * kl).masked_fill(~mask, 0)
    is_last = torch.arange(mask.shape[1], device=mask.device) == score_positions(mask).unsqueeze(1)
    return torch.where(is_last, penalties + scores.unsqueeze(1), penalties)
