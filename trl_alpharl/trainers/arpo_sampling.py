"""How ARPO gets its completions: which prompts, from which policy, and what comes back from earlier rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..functional.behavior import annealed, staged_noise
from ..functional.curriculum import intermediate
from ..functional.rewards import combine_rewards
from ..records import Rollout, Scored
from ..rollout.curriculum import PromptCurriculum, screened_places, screening_groups
from ..rollout.exploration import Exploration, norm_weights
from ..rollout.joining import join_rollouts
from ..rollout.prompts import prompt_rows, seeded_generator
from ..rollout.replay import ReplayBuffer, with_replayed


class ARPOSampling:
    """The stages `sample_prompts` and `explore`. What mixes this in is a `PPOTrainer` with an `ARPOConfig`."""

    def _set_up_sampling(self) -> None:
        args = self.args
        self.curriculum = None
        if args.curriculum == "success":
            self.curriculum = PromptCurriculum(len(self.train_dataset), args.success_target, args.curriculum_width)
        self.replay = None
        if args.replay_ratio:
            self.replay = ReplayBuffer(args.replay_size, args.replay_max_age, args.replay_priority)
        if args.norm_noise:
            norm_weights(self.model.policy)  # refuses a model that has none
        self._shaping_columns = [self._reward_column(name) for name in args.shaping_rewards or []]
        if len(self._shaping_columns) == len(self.reward_runner.names):
            raise ValueError("shaping_rewards names every reward function; at least one must say what success is.")

    def _reward_column(self, name: str) -> int:
        names = self.reward_runner.names
        if name not in names:
            raise ValueError(f"shaping_rewards: no reward function is called {name!r}; there are {', '.join(names)}.")
        return names.index(name)

    def progress(self, index: int) -> float:
        """The share of the run that is over when rollout `index` begins."""
        return min(1.0, index / self.args.num_total_batches)

    def sample_prompts(self, index: int) -> list[int]:
        """The dataset rows of rollout `index`, over all processes; drawn by the curriculum, in groups for screening."""
        args = self.args
        completions = 2 * args.screening or 1
        count = args.batch_size // completions
        seed = args.seed if args.data_seed is None else args.data_seed
        if self.curriculum is None:
            rows = prompt_rows(len(self.train_dataset), count, index, seed)
        else:
            rows = self.curriculum.rows(count, index, seed)
        return screening_groups(rows, completions)

    def exploration(self, index: int) -> Exploration | None:
        """How the behaviour policy of rollout `index` differs from the policy; None: it does not."""
        args, progress = self.args, self.progress(index)
        share = args.exploration_anneal or 0.0
        how = Exploration(
            logit_noise=annealed(args.logit_noise, share, progress),
            epsilon=annealed(args.epsilon_mix, share, progress),
            epsilon_top_p=args.epsilon_top_p or 1.0,
            norm_noise=staged_noise(args.norm_noise, args.norm_noise_end or 0.0, progress),
        )
        return how if how.active else None

    def explore(self, prompts: list[list[int]], examples: list[dict[str, Any]], index: int) -> Rollout:
        """Completions of the behaviour policy, screened prompts first, and replayed ones after them."""
        places = list(range(len(prompts)))
        if self.args.screening:
            rollout, places = self._screened(prompts, examples, index)
        else:
            rollout = self._sampled(prompts, examples, places, index, draw=1)
        self._record_exploration(index)
        if self.curriculum is not None:
            rows = torch.tensor(self.local_rows(index))[places]
            self.metrics.add("arpo/prompt_success", self.curriculum.success[rows].mean())
            rollout = replace(rollout, dataset_rows=rows.to(rollout.completion_ids.device))
        return self._with_replayed(rollout) if self.replay is not None else rollout

    def _record_exploration(self, index: int) -> None:
        args, how = self.args, self.exploration(index) or Exploration()
        amounts = {"logit_noise": how.logit_noise, "epsilon_mix": how.epsilon, "norm_noise": how.norm_noise}
        for name, amount in amounts.items():
            if getattr(args, name):
                self.metrics.add(f"arpo/{name}", amount)

    def _sampled(self, prompts: list, examples: list, places: list[int], index: int, draw: int) -> Rollout:
        chosen, rows = [prompts[place] for place in places], [examples[place] for place in places]
        return self.draw_completions(chosen, rows, index, draw, self.exploration(index))

    def _screened(self, prompts: list, examples: list, index: int) -> tuple[Rollout, list[int]]:
        """Half of the rollout as first completions of each prompt, then the other half where it teaches most; and which
        of `prompts` each row answers. The first half comes last: its rewards are known."""
        first = self.args.screening
        groups = range(0, len(prompts), 2 * first)
        places = [start + number for start in groups for number in range(first)]
        screened = self._sampled(prompts, examples, places, index, draw=1)
        rewards, fault = self.reward(screened, self.metrics)
        outcomes = self.successes(rewards).view(len(groups), first)
        self.metrics.add("arpo/screened_prompts", intermediate(outcomes).sum(), len(groups))
        if not fault:  # else the rewards are asked for again, and the fault shows in the whole rollout
            screened = replace(screened, known_rewards=rewards)
        chosen = [groups[place] for place in screened_places(outcomes.cpu(), len(prompts) - len(places))]
        finished = self._sampled(prompts, examples, chosen, index, draw=3)
        return join_rollouts(finished, screened, self.sampling.pad_id), [*chosen, *places]

    def _with_replayed(self, rollout: Rollout) -> Rollout:
        ratio = self.args.replay_ratio
        generator = seeded_generator(self.args.seed, rollout.index, self.args.process_index, 5)
        episodes = self.replay.draw(round(rollout.fresh * ratio / (1 - ratio)), rollout.index, generator)
        self.metrics.add("arpo/replayed", len(episodes), 1 / self.accelerator.num_processes)
        self.metrics.add("arpo/replay_age", sum(rollout.index - episode.born for episode in episodes), len(episodes))
        return with_replayed(rollout, episodes, self.sampling.pad_id)

    # Who succeeded

    def successes(self, rewards: Tensor) -> Tensor:
        """Which rows of rewards (B, F) succeed: those whose weighted sum, shaping left out, is over the threshold."""
        main = [column for column in range(rewards.shape[1]) if column not in self._shaping_columns]
        weights = torch.tensor(self.reward_runner.weights, dtype=rewards.dtype, device=rewards.device)
        scores, valid = combine_rewards(rewards[:, main], weights[main])
        return valid & (scores > self.args.success_threshold)

    def learn_difficulty(self, scored: Scored) -> None:
        """Let a used rollout's fresh rows, of all processes, change what is known of their prompts."""
        outcomes = self.successes(scored.rewards).double().masked_fill(~scored.valid, -1.0)
        told = torch.stack([scored.rollout.dataset_rows.double(), outcomes], 1)
        rows, outcomes = self.accelerator.gather(told).cpu().unbind(1)
        kept = outcomes >= 0
        self.curriculum.record(rows[kept].long().tolist(), outcomes[kept].tolist())
