"""Completions of S runs at once: drawn, screened, replayed, and read by the models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trl_alpharl.functional.behavior import annealed, behavior_log_probs, staged_noise
from trl_alpharl.functional.logps import logps_and_entropy
from trl_alpharl.rollout.curriculum import screened_places
from trl_alpharl.rollout.prompts import seeded_generator
from trl_alpharl.rollout.sampler import completion_mask

from .stacked import Weights
from .tasks import EOS, PAD


@dataclass
class Batch:
    """Rows of all runs, (S, B, ...): the fresh ones, then the replayed ones."""

    rows: Tensor  # which prompt; -1 where replayed
    ids: Tensor  # prompt and completion
    mask: Tensor  # of the completion
    mu: Tensor  # log-probs of the policy that sampled; NaN: the one that is trained
    rewards: Tensor  # (S, B, F) raw
    fresh: int

    def flat(self, tensor: Tensor) -> Tensor:
        """(S, B, ...) as (S B, ...)."""
        return tensor.flatten(0, 1)


class Sampling:
    """What `Study` mixes in."""

    # Completions

    def _collect(self, index: int, progress: float) -> Batch:
        size, first = self.args.batch_size, self.args.screening
        if not first:
            return self._sampled(self._draw(size, index), progress)
        groups = self._draw(size // (2 * first), index)
        screened = self._sampled(groups.repeat_interleave(first, 1), progress)
        won = self._successes(screened.rewards).view(len(self.seeds), -1, first)
        left = size - screened.rows.shape[1]
        chosen = torch.stack([rows[screened_places(run, left)] for rows, run in zip(groups, won)])
        finished = self._sampled(chosen, progress)
        names = ("rows", "ids", "mask", "mu", "rewards")
        joined = {name: torch.cat([getattr(part, name) for part in (finished, screened)], 1) for name in names}
        return Batch(**joined, fresh=size)

    def _draw(self, count: int, index: int) -> Tensor:
        rows = []
        for seed, run in zip(self.seeds, self.runs):
            if run.curriculum is not None:
                rows.append(torch.tensor(run.curriculum.rows(count, index, seed)))
            else:
                generator = seeded_generator(seed, index, 9)
                rows.append(torch.randperm(len(self.task.prompts), generator=generator)[:count])
        return torch.stack(rows)

    def _sampled(self, rows: Tensor, progress: float, explore: bool = True) -> Batch:
        args, prompts = self.args, torch.tensor(self.task.prompts)
        share = args.exploration_anneal or 0.0
        noise_size = annealed(args.logit_noise, share, progress) if explore else 0.0
        epsilon = annealed(args.epsilon_mix, share, progress) if explore else 0.0
        norm_noise = staged_noise(args.norm_noise, args.norm_noise_end or 0.0, progress) if explore else 0.0
        policy = self._noisy(norm_noise) if norm_noise else self.policy
        ids, mu, noise = prompts[rows], [], None
        with torch.no_grad():
            for _ in range(self.task.answer_length):
                logits = self._logits(policy, ids)[..., -1, :].flatten(0, 1)
                if noise_size and noise is None:
                    noise = noise_size * torch.randn(logits.shape, generator=self.generator)
                log_mu = behavior_log_probs(logits, args.temperature, noise, epsilon, args.epsilon_top_p or 1.0)
                token = torch.multinomial(log_mu.exp(), 1, generator=self.generator)
                mu.append(log_mu.gather(1, token).view(*rows.shape, 1))
                ids = torch.cat([ids, token.view(*rows.shape, 1)], 2)
        answers = ids[..., self.prompt_length :].flatten(0, 1)
        mask = completion_mask(answers, torch.ones_like(answers, dtype=torch.bool), [EOS])[0].view(*rows.shape, -1)
        ids[..., self.prompt_length :] = ids[..., self.prompt_length :].masked_fill(~mask, PAD)
        explored = bool(noise_size or epsilon or norm_noise)
        logps = torch.cat(mu, 2).masked_fill(~mask, 0.0) if explored else torch.full(mask.shape, torch.nan)
        rewards = self._asked(ids, mask, lambda prompt, answer: self._rewards(prompt, answer, progress))
        return Batch(rows, ids, mask, logps, rewards, rows.shape[1])

    def _noisy(self, size: float) -> Weights:
        noise = {
            n: size * torch.randn(w.shape, generator=self.generator) for n, w in self.policy.items() if "norm" in n
        }
        return {name: weight + noise[name] if name in noise else weight for name, weight in self.policy.items()}

    def _asked(self, ids: Tensor, mask: Tensor, ask: Any) -> Tensor:
        """What `ask` says of each row: (S, B, F) fp64."""
        answers = []
        for row, kept in zip(ids.flatten(0, 1).tolist(), mask.flatten(0, 1).sum(1).tolist()):
            answers.append(ask(row[: self.prompt_length], row[self.prompt_length :][:kept]))
        return torch.tensor(answers, dtype=torch.float64).view(*mask.shape[:2], -1)

    def _rewards(self, prompt: list[int], answer: list[int], progress: float) -> list[float]:
        own = self.task.rewards(prompt, answer, progress)
        return [*own, *(self.task.helpers[name](prompt, answer) for name in self.helpers)]

    def _successes(self, rewards: Tensor) -> Tensor:
        main = rewards[..., : rewards.shape[-1] - len(self.args.shaping_rewards or [])]  # these come last
        return main.sum(-1) > self.args.success_threshold

    def _with_replayed(self, batch: Batch, index: int) -> Batch:
        ratio = self.args.replay_ratio
        if not ratio:
            return batch
        wanted = round(batch.fresh * ratio / (1 - ratio))
        drawn = [run.replay.draw(wanted, index, seeded_generator(s, index, 5)) for s, run in zip(self.seeds, self.runs)]
        if not drawn[0]:
            return batch
        width = batch.ids.shape[-1]

        def padded(pick: Any, size: int, value: float) -> Tensor:
            rows = [
                [torch.nn.functional.pad(t, (0, size - len(t)), value=value) for t in map(pick, run)] for run in drawn
            ]
            return torch.stack([torch.stack(run) for run in rows])

        ids = padded(lambda e: torch.cat([e.prompt_ids, e.completion_ids]), width, PAD)
        mask = padded(lambda e: torch.ones(len(e.completion_ids), dtype=torch.bool), width - self.prompt_length, False)
        mu = padded(lambda e: e.behavior_logps, width - self.prompt_length, 0.0)
        rewards = torch.stack([torch.stack([episode.rewards for episode in run]) for run in drawn])
        parts = {"ids": ids, "mask": mask, "mu": mu, "rewards": rewards, "rows": torch.full(ids.shape[:2], -1)}
        return replace(batch, **{name: torch.cat([getattr(batch, name), new], 1) for name, new in parts.items()})

    # What the models say

    def _logits(self, weights: Weights, ids: Tensor) -> Tensor:
        return self.decoder(weights, ids) @ weights["head.weight"].mT.unsqueeze(1)

    def _token_stats(self, weights: Weights, ids: Tensor, squares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (S, B, C) of the completion tokens. The backward pass adds the squared norm of each
        run's gradient at the head's input to `squares` (S,)."""
        hidden = self.decoder(weights, ids)[:, :, self.prompt_length - 1 : -1]
        if squares is not None:

            def note(gradient: Tensor) -> None:
                squares.add_(gradient.square().flatten(1).sum(1))

            hidden.register_hook(note)
        logits = hidden @ weights["head.weight"].mT.unsqueeze(1) / self.args.temperature
        labels = ids[..., self.prompt_length :]
        logps, entropies = logps_and_entropy(logits.flatten(0, 2), labels.flatten())
        return logps.view(labels.shape), entropies.view(labels.shape)

    def _values(self, ids: Tensor) -> Tensor:
        hidden = self.decoder(self.critic, ids)[:, :, self.prompt_length - 1 : -1]
        values = (hidden @ self.critic["head.weight"].mT.unsqueeze(1)).squeeze(-1)
        return values + self.critic["head.bias"].unsqueeze(-1) if "head.bias" in self.critic else values
