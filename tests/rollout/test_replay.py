from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from trl_alpharl.records import Advantages, Rollout, Scored
from trl_alpharl.rollout.replay import Episode, ReplayBuffer, episodes_of, with_replayed

NAN = float("nan")


def episode(born: int = 0, priority: float = 1.0, length: int = 2, rewards=(1.0,), prompt=(7, 8)) -> Episode:
    return Episode(
        prompt_ids=torch.tensor(prompt),
        completion_ids=torch.arange(2, 2 + length),
        behavior_logps=-torch.arange(1.0, 1 + length) / 10,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        finished=length % 2 == 0,
        priority=priority,
        born=born,
    )


def rollout_of(index: int = 3) -> Rollout:
    """Prompts [5], [5, 6]; completions [9, 4, 1], [9] with pad 0."""
    return Rollout(
        index=index,
        prompt_ids=torch.tensor([[0, 5], [5, 6]]),
        prompt_mask=torch.tensor([[False, True], [True, True]]),
        completion_ids=torch.tensor([[9, 4, 1], [9, 0, 0]]),
        completion_mask=torch.tensor([[True, True, True], [True, False, False]]),
        finished=torch.tensor([True, False]),
        examples=[{"prompt": "a"}, {"prompt": "b"}],
    )


def experience_of(rollout: Rollout, valid=(True, True), **changes) -> Advantages:
    zeros = torch.zeros(rollout.completion_ids.shape)
    valid = torch.tensor(valid)
    rewards = torch.tensor([[2.0, NAN], [-1.0, 4.0]], dtype=torch.float64)
    scored = Scored(rollout, zeros - 0.5, zeros, zeros, zeros, torch.tensor([2.0, 3.0]), valid, True, rewards=rewards)
    mask = rollout.completion_mask & valid.unsqueeze(1)
    return Advantages(scored, mask, zeros, torch.tensor([[1.0, -2.0, 3.0], [-5.0, 0.0, 0.0]]), zeros, **changes)


def draw(buffer: ReplayBuffer, count: int, index: int, seed: int = 0) -> list[Episode]:
    return buffer.draw(count, index, torch.Generator().manual_seed(seed))


class TestBuffer:
    def test_keeps_the_newest(self):
        buffer = ReplayBuffer(size=3, max_age=100, priority="uniform")
        buffer.add([episode(0), episode(1)])
        buffer.add([episode(2), episode(3)])
        assert [e.born for e in buffer.episodes] == [1, 2, 3]

    def test_drops_what_is_too_old_for_the_rollout(self):
        buffer = ReplayBuffer(size=10, max_age=4, priority="uniform")
        buffer.add([episode(born) for born in range(6)])
        assert sorted(e.born for e in draw(buffer, 10, index=6)) == [2, 3, 4, 5]
        assert draw(buffer, 10, index=10) == [] and buffer.episodes == []

    def test_no_episode_twice_and_no_more_than_there_are(self):
        buffer = ReplayBuffer(size=10, max_age=100, priority="advantage")
        buffer.add([episode(born, priority=0.0) for born in range(5)])
        drawn = draw(buffer, 4, index=9)
        assert len({e.born for e in drawn}) == len(drawn) == 4
        assert len(draw(buffer, 50, index=9)) == 5

    @pytest.mark.parametrize(
        ("priority", "expected"),
        [("uniform", [1 / 3] * 3), ("advantage", [1 / 10, 3 / 10, 6 / 10]), ("reward", [0, 2 / 7, 5 / 7])],
    )
    def test_priorities(self, priority, expected):
        buffer = ReplayBuffer(size=10, max_age=100, priority=priority)
        buffer.add([episode(born, priority=value) for born, value in enumerate([1.0, 3.0, 6.0])])
        generator = torch.Generator().manual_seed(0)
        counts = Counter(buffer.draw(1, 9, generator)[0].born for _ in range(3000))
        assert [counts[born] / 3000 for born in range(3)] == pytest.approx(expected, abs=0.03)

    @pytest.mark.parametrize("values", [[0.0, 0.0], [-3.0, -3.0]])
    def test_rewards_without_a_difference_are_drawn_alike(self, values):
        buffer = ReplayBuffer(size=10, max_age=100, priority="reward")
        buffer.add([episode(born, priority=value) for born, value in enumerate(values)])
        assert {draw(buffer, 1, 1, seed)[0].born for seed in range(20)} == {0, 1}

    def test_an_unknown_priority_is_named(self):
        with pytest.raises(ValueError, match="replay_priority: found 'age', must be one of uniform, advantage, reward"):
            ReplayBuffer(1, 1, "age")

    @pytest.mark.parametrize("episodes", [[], [episode(1, 0.5, 3, (1.0, NAN)), episode(2, 2.0, 1, (NAN, -4.0), (3,))]])
    def test_a_safetensors_file_brings_it_back(self, tmp_path, episodes):
        buffer = ReplayBuffer(10, 8, "uniform")
        buffer.add(episodes)
        save_file(buffer.tensors(), tmp_path / "replay.safetensors")
        back = ReplayBuffer(10, 8, "uniform")
        back.load_tensors(load_file(tmp_path / "replay.safetensors"))
        assert len(back.episodes) == len(episodes)
        for found, kept in zip(back.episodes, episodes):
            for name, value in vars(kept).items():
                other = getattr(found, name)
                if isinstance(value, torch.Tensor):
                    assert other.dtype == value.dtype and torch.equal(other.nan_to_num(7), value.nan_to_num(7)), name
                else:
                    assert other == value and type(other) is type(value), name


class TestEpisodes:
    def test_raw_rewards_exact_tokens_and_both_priorities(self):
        first, second = episodes_of(experience_of(rollout_of()), "advantage")
        assert first.prompt_ids.tolist() == [5] and first.completion_ids.tolist() == [9, 4, 1]
        assert second.prompt_ids.tolist() == [5, 6] and second.completion_ids.tolist() == [9]
        assert first.rewards[0] == 2 and first.rewards[1].isnan() and second.rewards.tolist() == [-1.0, 4.0]
        assert (first.finished, second.finished, first.born) == (True, False, 3)
        assert (first.priority, second.priority) == (2.0, 5.0)
        assert [e.priority for e in episodes_of(experience_of(rollout_of()), "reward")] == [2.0, 3.0]
        assert first.behavior_logps.tolist() == [-0.5] * 3  # the policy's own

    def test_explored_rows_keep_the_log_probs_of_the_policy_that_sampled(self):
        from dataclasses import replace

        rollout = replace(rollout_of(), behavior_logps=torch.full((2, 3), -0.25))
        assert episodes_of(experience_of(rollout), "advantage")[1].behavior_logps.tolist() == [-0.25]

    def test_rows_without_opinion_and_replayed_rows_are_left_out(self):
        assert len(episodes_of(experience_of(rollout_of(), valid=(False, True)), "advantage")) == 1
        from dataclasses import replace

        rollout = replace(rollout_of(), replayed=1)
        assert [e.completion_ids.tolist() for e in episodes_of(experience_of(rollout), "advantage")] == [[9, 4, 1]]


class TestWithReplayed:
    def test_nothing_replayed_is_the_rollout_itself(self):
        rollout = rollout_of()
        assert with_replayed(rollout, [], 0) is rollout

    def test_rows_are_appended_and_padded(self):
        rollout = rollout_of()
        longer = with_replayed(rollout, [episode(1, length=4, prompt=(7, 8, 9)), episode(2, length=1, prompt=(3,))], 0)
        assert longer.prompt_ids.tolist() == [[0, 0, 5], [0, 5, 6], [7, 8, 9], [0, 0, 3]]
        assert longer.prompt_mask.sum(1).tolist() == [1, 2, 3, 1]
        assert longer.completion_ids.tolist() == [[9, 4, 1, 0], [9, 0, 0, 0], [2, 3, 4, 5], [2, 0, 0, 0]]
        assert longer.completion_mask.sum(1).tolist() == [3, 1, 4, 1]
        assert longer.finished.tolist() == [True, False, True, False]
        assert longer.behavior_logps[:2].isnan()[:, :3].all()
        torch.testing.assert_close(longer.behavior_logps[2], torch.tensor([-0.1, -0.2, -0.3, -0.4]))
        assert (longer.replayed, longer.fresh) == (2, 2)
        assert longer.known_rewards.tolist() == [[1.0], [1.0]]
        assert longer.examples == rollout.examples

    def test_head_gives_the_fresh_rows_back(self):
        rollout = rollout_of()
        fresh = with_replayed(rollout, [episode()], 0).head(2)
        assert fresh.replayed == 0 and fresh.known_rewards is None
        assert torch.equal(fresh.completion_ids[:, :3], rollout.completion_ids)
        assert rollout.head(2) is rollout

    def test_rewards_that_screening_knew_stay_before_those_of_the_replayed(self):
        from dataclasses import replace

        rollout = replace(rollout_of(), known_rewards=torch.tensor([[5.0]], dtype=torch.float64))
        assert with_replayed(rollout, [episode(rewards=(6.0,))], 0).known_rewards.tolist() == [[5.0], [6.0]]
