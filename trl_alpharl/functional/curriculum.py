"""Which prompts are worth a completion: those that the policy neither always nor never solves."""

from __future__ import annotations

import torch
from torch import Tensor


def success_weights(success: Tensor, target: float, width: float) -> Tensor:
    """Sampling weight of each prompt, exp(-((success - target) / width)^2 / 2): most at the target success rate.

    After AdaRFT (arXiv 2504.05520), which moves the difficulty toward a success rate of one half.

    Args: success (N,), the estimated success rate of each prompt; target in [0, 1]; width > 0, in success rate.
    Returns: (N,) in (0, 1], not normalised.

    >>> success_weights(torch.tensor([0.5, 0.0, 1.0]), target=0.5, width=0.25)
    tensor([1.0000, 0.1353, 0.1353])
    """
    return torch.exp(-((success - target) / width).square() / 2)


def draw_rows(weights: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` rows drawn in proportion to their weights; none twice before every row was drawn.

    Args: weights (N,) > 0; count >= 0; generator.
    Returns: row indices.

    >>> sorted(draw_rows(torch.ones(3), 3, torch.Generator().manual_seed(0)))
    [0, 1, 2]
    """
    rows: list[int] = []
    while len(rows) < count:
        most = min(count - len(rows), len(weights))
        rows += torch.multinomial(weights, most, replacement=False, generator=generator).tolist()
    return rows


def updated_success(success: float, tries: int, outcome: float, slowest: float = 0.2) -> float:
    """A prompt's success rate after one more outcome: a mean that begins at the prior, then an exponential average.

    The step is 1 / (tries + 2), as if the prior were one outcome, and never below `slowest`: the policy changes.

    Args: success, the estimate so far (the prior, before the first try); tries so far; outcome in [0, 1].

    >>> updated_success(0.5, tries=0, outcome=1.0), updated_success(0.5, tries=1000, outcome=1.0)
    (0.75, 0.6)
    """
    return success + (outcome - success) * max(1 / (tries + 2), slowest)


def intermediate(outcomes: Tensor) -> Tensor:
    """Which prompts were solved by some but not all of their completions (SPEED-RL, arXiv 2506.09016).

    Args: outcomes (N, k) bool, k completions of each prompt.
    Returns: (N,) bool.

    >>> intermediate(torch.tensor([[True, False], [True, True], [False, False]]))
    tensor([ True, False, False])
    """
    return outcomes.any(1) & ~outcomes.all(1)
