"""Completions from the policy, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationConfig

from ..records import Rollout
from .drawing import HalfEnded, TokenDraw
from .exploration import Exploration
from .prompts import pad_left


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `stop_ids` empty: exactly `response_length` tokens."""

    response_length: int  # tokens
    temperature: float
    stop_ids: tuple[int, ...]
    pad_id: int
    chunk_rows: int  # completions generated at once
    drop_finished_rows: bool = True  # go on without those that have ended, whenever half have


def stop_token_ids(
    stop_token: str | None, stop_token_id: int | None, tokenizer: Any, generation_config: Any
) -> tuple[int, ...]:
    """The ids that end a completion: with `stop_token="eos"` the union of all that anyone calls an end."""
    ids: list[int] = [] if stop_token_id is None else [stop_token_id]
    if stop_token == "eos":
        declared = getattr(generation_config, "eos_token_id", None)
        declared = [] if declared is None else declared if isinstance(declared, (list, tuple)) else [declared]
        ids += [tokenizer.eos_token_id, *declared]
        if not any(stop is not None for stop in ids):
            raise ValueError(
                "stop_token is 'eos', but neither the tokenizer nor the generation config has an eos token."
            )
    return tuple(sorted({int(stop) for stop in ids if stop is not None}))


def sample(
    actor_critic: Any,
    prompts: Sequence[Sequence[int]],
    examples: list[dict[str, Any]],
    index: int,
    sampling: Sampling,
    seed: int,
    exploration: Exploration | None = None,
) -> Rollout:
    """One rollout: a completion for each of B prompts, from the policy or from what `exploration` makes of it; the
    record then holds that policy's log-probs.

    The draw depends on `seed`, the prompts and the weights, never on global random state. Each chunk stops when all its
    rows have ended.
    """
    device = actor_critic.device
    completions: list[Tensor] = []
    logps: list[Tensor] = []
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), _neutral_generation(actor_critic, sampling) as config:
        torch.manual_seed(seed)
        with nullcontext() if exploration is None else exploration.perturbed(actor_critic.policy):
            for start in range(0, len(prompts), sampling.chunk_rows):
                ids, mask = pad_left(prompts[start : start + sampling.chunk_rows], sampling.pad_id, device)
                recorder = None if exploration is None else exploration.recorder(sampling.temperature)
                found, recorded = _generate(actor_critic, ids, mask.long(), config, sampling, recorder)
                completions.append(found)
                logps.append(recorded)
    rollout = assemble(prompts, completions, examples, index, sampling, device)
    if exploration is None:
        return rollout
    width = rollout.completion_ids.shape[1]
    recorded = torch.cat([_widen(part, width, 0) for part in logps])
    return replace(rollout, behavior_logps=recorded.masked_fill(~rollout.completion_mask, 0.0))


def _generate(
    actor_critic: Any, ids: Tensor, mask: Tensor, config: GenerationConfig, sampling: Sampling, recorder: Any
) -> tuple[Tensor, Tensor]:
    """Completions (rows, tokens) of prompts (rows, P), padded where they have ended; with a recorder, their log-probs.

    Whenever half of the rows have ended, the others go on in a smaller batch, with their part of the cache. Every row
    keeps its own random numbers, so that this changes no draw.
    """
    rows = torch.arange(len(ids), device=ids.device)
    completions = ids.new_full((len(ids), sampling.response_length), sampling.pad_id)
    logps = torch.zeros(completions.shape, dtype=torch.float32, device=ids.device)
    # A recorder divides by the temperature itself.
    draw = TokenDraw(sampling.temperature if recorder is None else 1.0, rows)
    stops = torch.tensor(sampling.stop_ids, dtype=ids.dtype, device=ids.device)
    done, cache = 0, None
    while len(rows) and done < sampling.response_length:
        ending = HalfEnded(stops) if len(stops) and sampling.drop_finished_rows else None
        config.max_new_tokens = sampling.response_length - done
        found = actor_critic.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=config,
            logits_processor=[draw] if recorder is None else [recorder, draw],
            stopping_criteria=None if ending is None else [ending],
            return_dict_in_generate=True,
        )
        new = found.sequences[:, ids.shape[1] :]
        part = (rows[:, None], torch.arange(done, done + new.shape[1], device=ids.device))
        completions[part] = new
        if recorder is not None:
            logps[part] = recorder.logps(new).to(logps)
        done += new.shape[1]
        if ending is None or done == sampling.response_length:
            break
        going = (~ending.ended).nonzero().squeeze(1)
        cache = found.past_key_values if isinstance(found.past_key_values, Cache) else None  # else it is made anew
        if cache is not None:
            cache.reorder_cache(going)
        ids, rows = found.sequences[going], rows[going]
        mask = torch.cat([mask, torch.ones_like(new)], 1)[going]
        draw.rows = rows
        if recorder is not None:
            recorder.keep(going)
    return completions[:, :done], logps[:, :done]


def assemble(prompts, completions, examples, index, sampling: Sampling, device) -> Rollout:
    """The record of B completions, which come as tensors (rows, tokens) of one or more rows, each of its own width."""
    prompt_ids, prompt_mask = pad_left(prompts, sampling.pad_id, device)
    width = max(chunk.shape[1] for chunk in completions)
    ids = torch.cat([_widen(chunk, width, sampling.pad_id) for chunk in completions])
    generated = torch.cat([_widen(torch.ones_like(chunk), width, 0) for chunk in completions]).bool()
    mask, finished = completion_mask(ids, generated, sampling.stop_ids)
    return Rollout(
        index=index,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=ids.masked_fill(~mask, sampling.pad_id),
        completion_mask=mask,
        finished=finished,
        examples=examples,
    )


def completion_mask(ids: Tensor, generated: Tensor, stop_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which of the generated tokens (B, C) count: those up to the first stop token, itself included.

    The rule goes by position: a pad token before the stop is a token like any other, also when pad is eos.
    Returns the mask (B, C) and whether each row was ended by a stop token (B,).
    """
    stops = torch.isin(ids, torch.tensor(list(stop_ids), dtype=ids.dtype, device=ids.device)) & generated
    before = stops.long().cumsum(1) - stops.long()
    return generated & (before == 0), stops.any(1)


def _widen(ids: Tensor, width: int, value: int) -> Tensor:
    return F.pad(ids, (0, width - ids.shape[1]), value=value)


@contextmanager
def _neutral_generation(actor_critic: Any, sampling: Sampling) -> Iterator[GenerationConfig]:
    """A generation config that samples from the plain softmax, while the model's own is set aside.

    `generate` fills what is unset from the model's config (top_p, repetition_penalty, ...); samples would then come
    from another distribution than the one whose log-probs are trained.
    """
    config = GenerationConfig(
        max_new_tokens=sampling.response_length,
        do_sample=False,  # the logits processor draws
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.pad_id,
        use_cache=True,
    )
    own = actor_critic.generation_config
    actor_critic.set_generation_config(config)
    try:
        with actor_critic.sampling():
            yield config
    finally:
        actor_critic.set_generation_config(own)
