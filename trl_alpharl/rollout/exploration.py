"""Sampling from a noisier policy than the one that is trained, with the exact log-probs of what was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from ..functional.behavior import behavior_log_probs


@dataclass(frozen=True)
class Exploration:
    """How far one rollout's behaviour policy is from the policy. All 0: it is the policy."""

    logit_noise: float = 0.0  # deviation of normal noise on the scaled logits, one draw a completion
    epsilon: float = 0.0  # share of uniform tokens
    epsilon_top_p: float = 1.0  # the uniform tokens come from the most likely ones that reach this probability
    norm_noise: float = 0.0  # deviation of normal noise on the RMSNorm weights, one draw a rollout

    @property
    def active(self) -> bool:
        """Whether the behaviour policy differs from the policy."""
        return bool(self.logit_noise or self.epsilon or self.norm_noise)

    @contextmanager
    def perturbed(self, policy: nn.Module) -> Iterator[None]:
        """The policy with noise on its RMSNorm weights (QeRL, arXiv 2510.11696); its own bits come back at the end."""
        weights = norm_weights(policy) if self.norm_noise else []
        own = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                for weight in weights:
                    weight.add_(torch.randn_like(weight), alpha=self.norm_noise)
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(weights, own):
                    weight.copy_(before)

    def recorder(self, temperature: float) -> BehaviorRecorder:
        """What `generate` takes as a logits processor for one chunk of completions."""
        return BehaviorRecorder(self, temperature)


class BehaviorRecorder(LogitsProcessor):
    """Turns logits into log mu, so that `generate` (at temperature 1) samples from mu, and keeps log mu of each token.

    One object serves the completions of one batch of prompts: `generate`, then `logps`; after `keep` the same for the
    rows that go on. It holds one step's (rows, V) log-probs at a time.
    """

    def __init__(self, exploration: Exploration, temperature: float) -> None:
        self.exploration, self.temperature = exploration, temperature
        self._noise: Tensor | None = None
        self._last: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """log mu (rows, V) of the next token; the last column of `input_ids` is what the step before drew."""
        how = self.exploration
        if self._last is not None:
            self._note(input_ids[:, -1])
        elif how.logit_noise and self._noise is None:
            self._noise = how.logit_noise * torch.randn_like(scores)
        self._last = behavior_log_probs(scores, self.temperature, self._noise, how.epsilon, how.epsilon_top_p)
        return self._last

    def _note(self, tokens: Tensor) -> None:
        self._chosen.append(self._last.gather(1, tokens.unsqueeze(1)))

    def logps(self, completion_ids: Tensor) -> Tensor:
        """log mu (rows, C) of what one call of `generate` added, nats; past a completion's end, anything."""
        self._note(completion_ids[:, -1])
        chosen, self._chosen, self._last = self._chosen, [], None
        return torch.cat(chosen, 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, each with the noise it had."""
        self._noise = None if self._noise is None else self._noise[rows]


def norm_weights(policy: nn.Module) -> list[nn.Parameter]:
    """The weights of all RMSNorm layers. Raises ValueError for a model without any."""
    layers = [module for module in policy.modules() if type(module).__name__.endswith("RMSNorm")]
    weights = [layer.weight for layer in layers if getattr(layer, "weight", None) is not None]
    if not weights:
        raise ValueError("norm_noise: the model has no RMSNorm layers to put noise on; use logit_noise.")
    return weights


def behavior_or_own(behavior_logps: Tensor | None, old_logps: Tensor) -> Tensor:
    """log mu (B, C): the recorded log-probs, and the policy's own where it did the sampling. Any may be at padding."""
    if behavior_logps is None:
        return old_logps
    return torch.where(behavior_logps.isnan(), old_logps, behavior_logps)
