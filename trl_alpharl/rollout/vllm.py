"""Completions from the policy by vLLM, through TRL's `VLLMGeneration`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import set_seed

from .._trl import vllm_generation
from ..records import Rollout
from .sampler import Sampling, assemble


class VLLMSampler:
    """An engine with its own copy of the weights, which is brought up to date before every draw.

    Args:
        policy: a module whose `named_parameters` are what the model at its `name_or_path` has, merged and current.
        accelerator, tokenizer: the trainer's.
        sampling: as for transformers' `generate`; `chunk_rows` has no say here.
        settings: more arguments of `VLLMGeneration`.
        seed: of the engine's start.
    """

    def __init__(
        self,
        policy: nn.Module,
        accelerator: Any,
        tokenizer: Any,
        sampling: Sampling,
        settings: dict[str, Any],
        seed: int,
    ) -> None:
        self.sampling = sampling
        self.device = accelerator.device
        with _seeded(seed, self.device):  # an engine in this process seeds its generators when it starts
            self.generation = vllm_generation()(
                model=policy,
                accelerator=accelerator,
                processing_class=tokenizer,
                temperature=sampling.temperature,
                max_completion_length=sampling.response_length,
                generation_kwargs={"stop_token_ids": list(sampling.stop_ids), "ignore_eos": True},
                **settings,
            )

    def sample(
        self, prompts: Sequence[Sequence[int]], examples: list[dict[str, Any]], index: int, seed: int
    ) -> tuple[Rollout, float]:
        """One rollout, a completion for each of B prompts, and the sum of all its tokens' log-probs, in nats, as the
        engine has them.

        Raises ValueError when the engine's context is too short for a prompt and its completion.
        """
        autocast = torch.autocast(self.device.type, enabled=False)  # the sums of base and adapter are not to be rounded
        with torch.no_grad(), autocast, _seeded(seed, self.device):
            self.generation.sync_weights()
            _, ids, logps, _ = self.generation.generate([list(row) for row in prompts], None, 1)
        completions = [torch.tensor([list(row)], dtype=torch.long, device=self.device) for row in ids]
        rollout = assemble(prompts, completions, examples, index, self.sampling, self.device)
        cut = ~rollout.finished & (rollout.completion_mask.sum(1) < self.sampling.response_length)
        if cut.any():
            longest = max(map(len, prompts)) + self.sampling.response_length
            raise ValueError(
                f"vLLM cut off {int(cut.sum())} completions; its context must hold prompt and response_length, up to "
                f"{longest} tokens: raise vllm_max_model_length (of a server: --max-model-len)."
            )
        return rollout, sum(_number(step[0]) for row in logps for step in row)


def _number(logp: float | None) -> float:
    return float("nan") if logp is None else logp  # TRL writes NaN as None


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Every generator that an engine in this process may draw from starts from `seed`, and goes on afterwards as if
    nothing had been drawn.

    A seed in vLLM's sampling parameters is no way: all prompts of a call would share it, and its noise with it, so that
    two completions of one prompt would be one and the same.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        set_seed(seed % 2**32)  # numpy takes no more
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
