"""Earlier completions, kept to be trained on again.

Rewards are stored raw, as the reward functions gave them, and scaled at use with the statistics of that time: scores
stored in the units of an old scale would disagree with new ones about what is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..records import Advantages, Rollout
from .exploration import behavior_or_own
from .joining import join_rollouts
from .prompts import pad_left

PRIORITIES = ("uniform", "advantage", "reward")
_LEAST = 1e-3  # of the mean priority: no episode is out of reach


@dataclass(frozen=True)
class Episode:
    """One completion on the CPU, without padding: P prompt tokens, C completion tokens, F reward functions."""

    prompt_ids: Tensor  # (P,) long
    completion_ids: Tensor  # (C,) long
    behavior_logps: Tensor  # (C,) nats, of the policy that sampled it
    rewards: Tensor  # (F,) fp64, raw; NaN = no opinion
    finished: bool  # ended by a stop token
    priority: float  # mean |advantage| or score when it was sampled
    born: int  # the rollout it was sampled for


class ReplayBuffer:
    """The newest `size` episodes that are at most `max_age` rollouts old.

    `priority`: which episodes come back more often. uniform: none; advantage: in proportion to the mean |advantage| at
    sampling; reward: in proportion to the score's distance from the lowest one in the buffer.
    Raises ValueError for another priority.
    """

    def __init__(self, size: int, max_age: int, priority: str) -> None:
        if priority not in PRIORITIES:
            raise ValueError(f"replay_priority: found {priority!r}, must be one of {', '.join(PRIORITIES)}")
        self.size, self.max_age, self.priority = size, max_age, priority
        self.episodes: list[Episode] = []

    def add(self, episodes: Sequence[Episode]) -> None:
        """Keep episodes; the oldest beyond `size` go."""
        self.episodes = [*self.episodes, *episodes][-self.size :]

    def draw(self, count: int, index: int, generator: torch.Generator) -> list[Episode]:
        """Up to `count` different episodes for rollout `index`, those too old for it gone for good."""
        self.episodes = [episode for episode in self.episodes if index - episode.born <= self.max_age]
        count = min(count, len(self.episodes))
        if count == 0:
            return []
        chosen = torch.multinomial(self._weights(), count, replacement=False, generator=generator)
        return [self.episodes[at] for at in chosen.tolist()]

    def _weights(self) -> Tensor:
        priorities = torch.tensor([episode.priority for episode in self.episodes], dtype=torch.float64)
        if self.priority == "uniform":
            return torch.ones_like(priorities)
        if self.priority == "reward":
            priorities = priorities - priorities.min()
        if priorities.max() <= 0:
            return torch.ones_like(priorities)
        return priorities + _LEAST * priorities.mean()

    def tensors(self) -> dict[str, Tensor]:
        """The buffer as flat tensors, for a safetensors file."""
        kept = self.episodes
        return {
            "prompt_lengths": torch.tensor([len(episode.prompt_ids) for episode in kept], dtype=torch.long),
            "completion_lengths": torch.tensor([len(episode.completion_ids) for episode in kept], dtype=torch.long),
            "prompt_ids": _joined([episode.prompt_ids for episode in kept], torch.long),
            "completion_ids": _joined([episode.completion_ids for episode in kept], torch.long),
            "behavior_logps": _joined([episode.behavior_logps for episode in kept], torch.float32),
            "rewards": _joined([episode.rewards for episode in kept], torch.float64),
            "finished": torch.tensor([episode.finished for episode in kept], dtype=torch.bool),
            "priority": torch.tensor([episode.priority for episode in kept], dtype=torch.float64),
            "born": torch.tensor([episode.born for episode in kept], dtype=torch.long),
        }

    def load_tensors(self, saved: dict[str, Tensor]) -> None:
        """Go on with what `tensors` wrote."""
        count = len(saved["born"])
        prompts = saved["prompt_ids"].split(saved["prompt_lengths"].tolist())
        lengths = saved["completion_lengths"].tolist()
        completions, logps = saved["completion_ids"].split(lengths), saved["behavior_logps"].split(lengths)
        rewards = saved["rewards"].view(count, -1) if count else saved["rewards"]
        facts = zip(saved["finished"].tolist(), saved["priority"].tolist(), saved["born"].tolist())
        self.episodes = [
            Episode(*tensors, *plain) for *tensors, plain in zip(prompts, completions, logps, rewards, facts)
        ]


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def episodes_of(experience: Advantages, priority: str) -> list[Episode]:
    """The fresh rows of a rollout that some reward function had an opinion on, as episodes."""
    part = experience.head(experience.scored.rollout.fresh)
    scored, rollout = part.scored, part.scored.rollout
    mu = behavior_or_own(rollout.behavior_logps, scored.old_per_token_logps)
    size = part.advantages.abs().sum(1) / part.mask.sum(1).clamp(min=1)
    priorities = scored.scores if priority == "reward" else size
    return [
        Episode(
            prompt_ids=rollout.prompt_ids[row][rollout.prompt_mask[row]].cpu(),
            completion_ids=rollout.completion_ids[row][rollout.completion_mask[row]].cpu(),
            behavior_logps=mu[row][rollout.completion_mask[row]].float().cpu(),
            rewards=scored.rewards[row].double().cpu().clone(),  # not a view that keeps the whole rollout
            finished=bool(rollout.finished[row]),
            priority=float(priorities[row]),
            born=rollout.index,
        )
        for row in scored.valid.nonzero().squeeze(1).tolist()
    ]


def with_replayed(rollout: Rollout, episodes: Sequence[Episode], pad_id: int) -> Rollout:
    """The rollout with episodes as its last rows; their rewards are known."""
    if not episodes:
        return rollout
    device = rollout.completion_ids.device
    prompt_ids, prompt_mask = pad_left([episode.prompt_ids.tolist() for episode in episodes], pad_id, device)
    lengths = torch.tensor([len(episode.completion_ids) for episode in episodes], device=device)
    completion_ids = pad_sequence([episode.completion_ids for episode in episodes], True, pad_id).to(device)
    replayed = Rollout(
        index=rollout.index,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=torch.arange(completion_ids.shape[1], device=device) < lengths.unsqueeze(1),
        finished=torch.tensor([episode.finished for episode in episodes], device=device),
        examples=[],
        replayed=len(episodes),
        behavior_logps=pad_sequence([episode.behavior_logps for episode in episodes], True).to(device),
        known_rewards=torch.stack([episode.rewards for episode in episodes]).to(device),
    )
    return join_rollouts(rollout, replayed, pad_id)
