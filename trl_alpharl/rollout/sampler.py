"""Completions from the policy, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessor, StoppingCriteria

from ..records import Rollout
from .exploration import Exploration
from .prompts import pad_left

_BLOCK = 256  # words


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
    logps = torch.zeros(completions.shape, device=ids.device)
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


class HalfEnded(StoppingCriteria):
    """Ends a `generate` once at least half of its rows have ended; `ended` (rows,) says which."""

    def __init__(self, stop_ids: Tensor) -> None:
        self.stop_ids = stop_ids
        self.ended = torch.zeros((), dtype=torch.bool, device=stop_ids.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ended = self.ended | torch.isin(input_ids[:, -1], self.stop_ids)
        return (2 * self.ended.sum() >= len(self.ended)).expand(len(self.ended))


class TokenDraw(LogitsProcessor):
    """Draws the next token from softmax(logits / temperature) and gives it the greatest score, for a `generate` that
    takes the greatest. One uniform number a row decides, where `multinomial` draws one for every word.

    `rows` (R,): which of the rows at the start these are; the numbers of all are drawn. They may become fewer.
    """

    def __init__(self, temperature: float, rows: Tensor) -> None:
        self.temperature, self.rows = temperature, rows
        self.count = len(rows)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (rows, V): 1 for the token that was drawn, 0 for all others."""
        rows, vocabulary = scores.shape
        # Two stages: running sums of the whole vocabulary in fp64 take longer than all of a small model's layers.
        likely = F.pad(torch.softmax(scores / self.temperature, -1, dtype=torch.float32), (0, -vocabulary % _BLOCK))
        blocks = likely.view(rows, -1, _BLOCK)
        upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
        at = torch.rand(self.count, 1, dtype=torch.float64, device=scores.device)[self.rows] * upto[:, -1:]
        block = _first_above(upto, at)
        before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
        within = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1).double().cumsum(-1)
        token = (block * _BLOCK + _first_above(within, at - before)).clamp_(max=vocabulary - 1)  # NaN: some token
        return torch.zeros_like(scores).scatter_(1, token, 1.0)


def _first_above(upto: Tensor, at: Tensor) -> Tensor:
    """The first place (rows, 1) whose running sum (rows, places) is above `at` (rows, 1), which is never one that adds
    nothing; for an `at` that rounding took to the end, the last such place."""
    place = torch.searchsorted(upto, torch.minimum(at, upto[:, -1:] * (1 - 2**-52)), right=True)
    return place.clamp_(max=upto.shape[1] - 1)  # past the end: NaN


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
