"""Where ARPO's completions come from: curriculum, screening, exploration, replay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from datasets import Dataset

OFF = {"preset": "ppo"}


def even(prompts, completions, **kwargs):
    """1 when a completion's first word has an even number."""
    return [float(int(text.split()[0][1:]) % 2 == 0) if text.split() else 0.0 for text in completions]


def next_experience(run, index):
    """One rollout by the public steps, without optimizer steps."""
    run.state.global_step = index * run.args.steps_per_rollout
    experience = run.advantages(run.score(run.rollout(index)))
    run.after_update(experience)
    return experience


class TestPrompts:
    def test_without_a_curriculum_they_are_ppo_s(self, arpo, trainer):
        plain, ours = trainer(), arpo(**OFF)
        assert [ours.sample_prompts(index) for index in range(9)] == [plain.sample_prompts(index) for index in range(9)]

    def test_the_curriculum_learns_from_every_fresh_row(self, arpo):
        run = arpo(**OFF, curriculum="success", reward_funcs=even, replay_ratio=0.5)
        expected = Counter()
        for index in range(3):
            rows = run.sample_prompts(index)
            assert rows == run.sample_prompts(index)
            experience = next_experience(run, index)
            rollout = experience.scored.rollout
            assert rollout.dataset_rows.tolist() == rows and rollout.fresh == 8
            expected.update(rows)
        assert {row: int(run.curriculum.tries[row]) for row in expected} == dict(expected)
        assert run.curriculum.tries.sum() == 24
        assert set(run.curriculum.success[run.curriculum.tries == 1].tolist()) <= {0.25, 0.75}

    def test_prompts_drift_to_those_solved_half_of_the_time(self, arpo, tokenizer):
        """Prompt `w2` is never solved, `w4` always, `w3` by the word that comes first: about half of the time."""

        def by_prompt(prompts, completions, **kwargs):
            luck = even(prompts, completions)
            return [{"w2": 0.0, "w4": 1.0}.get(prompt, chance) for prompt, chance in zip(prompts, luck)]

        data = Dataset.from_dict({"prompt": ["w2", "w3", "w4"] * 20})
        run = arpo(**OFF, curriculum="success", train_dataset=data, reward_funcs=by_prompt, total_episodes=480)
        drawn = []
        for index in range(60):
            drawn.append(Counter(row % 3 for row in run.sample_prompts(index)))
            next_experience(run, index)
        first, last = sum(drawn[:10], Counter()), sum(drawn[-10:], Counter())
        assert first[1] < 40 and last[1] > 1.4 * first[1]

    def test_a_prompt_without_any_opinion_teaches_nothing_about_its_difficulty(self, arpo):
        def none_at_first(completions, **kwargs):
            return [None, *[1.0] * (len(completions) - 1)]

        run = arpo(**OFF, curriculum="success", reward_funcs=none_at_first)
        rows = run.sample_prompts(0)
        next_experience(run, 0)
        assert run.curriculum.tries[rows].tolist() == [0, *[1] * 7]


class TestScreening:
    def test_the_second_half_goes_to_prompts_that_are_solved_sometimes(self, arpo):
        asked = []

        def reward(prompts, completions, **kwargs):
            """Of each prompt's two first completions: the first prompt fails both, the second solves one."""
            asked.append(list(prompts))
            if len(asked) == 1:
                return [0.0, 0.0, 1.0, 0.0]
            return [0.5] * len(completions)

        run = arpo(**OFF, screening=2, reward_funcs=reward)
        rows = run.sample_prompts(0)
        assert len(rows) == 8 and rows == [rows[0]] * 4 + [rows[4]] * 4 and rows[0] != rows[4]
        experience = run.advantages(run.score(run.rollout(0)))
        prompts = [run.train_dataset[row]["prompt"] for row in (rows[0], rows[4])]
        assert asked == [[prompts[0]] * 2 + [prompts[1]] * 2, [prompts[1]] * 4]  # nobody is asked twice
        assert experience.scored.scores.tolist() == [0.5] * 4 + [0.0, 0.0, 1.0, 0.0]
        assert experience.scored.rollout.fresh == 8
        assert run._flush_metrics()["objective/scores"] == pytest.approx(3 / 8)

    def test_completions_of_both_halves_differ_and_repeat(self, arpo):
        run = arpo(**OFF, screening=4, reward_funcs=even)
        rollout = run.rollout(0)
        again = arpo(**OFF, screening=4, reward_funcs=even).rollout(0)
        assert torch.equal(rollout.completion_ids, again.completion_ids)
        assert len({tuple(row) for row in rollout.completion_ids.tolist()}) > 4

    def test_rows_for_the_curriculum_follow_the_completions(self, arpo):
        run = arpo(**OFF, screening=2, curriculum="success", reward_funcs=even)
        rollout = run.rollout(0)
        for row, ids, mask in zip(rollout.dataset_rows.tolist(), rollout.prompt_ids, rollout.prompt_mask):
            assert run.processing_class.decode(ids[mask]) == run.train_dataset[row]["prompt"]

    def test_a_fault_in_the_first_half_is_a_fault_of_the_rollout(self, arpo):
        run = arpo(**OFF, screening=2, reward_funcs=lambda completions, **kwargs: [float("nan")] * len(completions))
        scored = run.score(run.rollout(0))
        assert not scored.finite and "lambda" in scored.cause


class TestExploration:
    def test_amounts_fall_over_the_run(self, arpo):
        run = arpo(**OFF, logit_noise=0.4, epsilon_mix=0.2, norm_noise=0.01, total_episodes=80, exploration_anneal=0.5)
        amounts = [run.exploration(index) for index in range(10)]
        assert [how.logit_noise for how in amounts[:5]] == pytest.approx([0.4, 0.32, 0.24, 0.16, 0.08])
        assert [how.epsilon for how in amounts[:5]] == pytest.approx([0.2, 0.16, 0.12, 0.08, 0.04])
        assert [how.norm_noise for how in amounts] == pytest.approx([1e-2 * 100 ** (-k / 9) for k in range(10)])
        assert arpo(**OFF, logit_noise=0.4, exploration_anneal=0.0, total_episodes=80).exploration(9).logit_noise == 0.4

    def test_where_it_has_fallen_to_zero_the_policy_samples(self, arpo, trainer):
        run = arpo(**OFF, epsilon_mix=0.2, exploration_anneal=0.5)
        assert run.rollout(0).behavior_logps is not None
        later = run.rollout(1)
        assert later.behavior_logps is None
        assert torch.equal(later.completion_ids, trainer().rollout(1).completion_ids)

    def test_evaluation_does_not_explore(self, arpo, trainer, dataset):
        few = dataset.select(range(4))
        noisy = arpo(**OFF, logit_noise=5.0).score_dataset(few)
        assert noisy == trainer().score_dataset(few)

    def test_a_model_without_rms_norms_is_refused_before_training(self, arpo):
        from transformers import GPT2Config, GPT2LMHeadModel

        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=64))
        with pytest.raises(ValueError, match="norm_noise: the model has no RMSNorm layers"):
            arpo(**OFF, norm_noise=0.01, model=gpt2)


class TestReplay:
    def test_rows_come_back_with_their_tokens_and_raw_rewards(self, arpo):
        asked = []

        def counted(completions, **kwargs):
            asked.append(len(completions))
            return even(None, completions)

        run = arpo(**OFF, replay_ratio=0.5, reward_funcs=counted)
        first, second = next_experience(run, 0), next_experience(run, 1)
        assert (first.scored.rollout.replayed, second.scored.rollout.replayed) == (0, 8)
        assert asked == [8, 8]  # fresh rows only

        def rows_of(experience, rows):
            scored = experience.scored
            return sorted(
                (
                    scored.rollout.completion_ids[row][scored.rollout.completion_mask[row]].tolist(),
                    float(scored.scores[row]),
                )
                for row in rows
            )

        assert rows_of(second, range(8, 16)) == rows_of(first, range(8))

    def test_the_share_is_the_ratio_and_the_number_of_steps_stays(self, arpo):
        run = arpo(**OFF, replay_ratio=0.75, num_mini_batches=2, total_episodes=48)
        sizes = []
        plan = run.plan

        def noted(rollout):
            chunks, batches = plan(rollout)
            sizes.append([[len(rows) for rows in epoch] for epoch in batches])
            return chunks, batches

        run.plan = noted
        run.train()
        assert run.state.global_step == 6 * 2 * 2
        assert sizes[-1] == [[16, 16], [16, 16]]  # 8 fresh and 24 replayed rows in two mini-batches

    def test_metrics_and_controllers_see_fresh_rows_only(self, arpo):
        run = arpo(**OFF, replay_ratio=0.5, reward_funcs=even, total_episodes=32)
        run.train()
        for entry in run.state.log_history:
            if "objective/scores" in entry:
                assert entry["objective/scores"] == pytest.approx(entry["reward/even/mean"])
                assert entry["arpo/replayed"] in (0, 8)

    def test_old_rewards_are_scaled_with_today_s_statistics(self, arpo):
        """Rewards that grow a hundredfold: a replayed row of the small ones is small now."""
        scale = [1.0]

        def growing(completions, **kwargs):
            return [scale[0] * (position - 3.5) for position, _ in enumerate(completions)]

        run = arpo(**OFF, replay_ratio=0.5, reward_scaling="robust", reward_funcs=growing, kl_coef=0.0)
        early = next_experience(run, 0)
        scale[0] = 100.0
        late = next_experience(run, 1)
        assert early.token_rewards.sum(1).abs().max() > 0.7
        assert late.token_rewards[8:].sum(1).abs().max() < 0.03
        assert late.token_rewards[:8].sum(1).abs().max() > 0.7

    def test_a_rollout_that_is_not_finite_is_not_kept(self, arpo):
        run = arpo(
            **OFF, replay_ratio=0.5, reward_funcs=lambda completions, **kwargs: [float("inf")] * len(completions)
        )
        next_experience(run, 0)
        assert run.replay.episodes == []


class TestShapingNames:
    def test_unknown_and_all(self, arpo):
        def length(completions, **kwargs):
            return [float(len(text)) for text in completions]

        with pytest.raises(
            ValueError, match="shaping_rewards: no reward function is called 'size'; there are even, length"
        ):
            arpo(**OFF, shaping_rewards=["size"], reward_funcs=[even, length])
        with pytest.raises(ValueError, match="shaping_rewards names every reward function"):
            arpo(**OFF, shaping_rewards=["even", "length"], reward_funcs=[even, length])
