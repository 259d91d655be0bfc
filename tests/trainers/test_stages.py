"""The stages: what a rollout becomes on its way to the losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trl_alpharl.rollout.scoring import gather_rows


def bias_logit(model, token: int, amount: float) -> None:
    """Add `amount` to one token's logit everywhere."""
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size), requires_grad=False)
    model.lm_head.bias.data[token] = amount


class TestSamplePrompts:
    def test_every_row_once_a_pass(self, trainer, dataset):
        it = trainer()
        rows = [row for index in range(len(dataset) // 8) for row in it.sample_prompts(index)]
        assert sorted(rows) == list(range(len(dataset)))

    def test_passes_differ_and_repeat_by_index(self, trainer):
        it = trainer()
        assert it.sample_prompts(0) != it.sample_prompts(8)
        assert it.sample_prompts(3) == it.sample_prompts(3)


class TestRollout:
    def test_ends_at_the_first_stop_token(self, trainer, model):
        """A strong eos: one token, not six (trl#2387); the saved generation config keeps its eos."""
        bias_logit(model, 1, 50.0)
        it = trainer()
        rollout = it.rollout(0)
        assert rollout.completion_ids.shape[1] == 1
        assert rollout.finished.all()
        assert model.generation_config.eos_token_id == 1

    def test_stop_token_none_gives_exactly_response_length(self, trainer, model):
        bias_logit(model, 1, 50.0)
        rollout = trainer(stop_token=None).rollout(0)
        assert rollout.completion_mask.sum(1).tolist() == [6] * 8
        assert not rollout.finished.any()

    def test_a_strong_pad_token_is_a_token_like_any_other(self, trainer, model):
        """Answers that look empty when padding is told by token id (trl#1540): finite losses, the run goes on."""
        for amount in (2.5, 50.0):
            bias_logit(model, 0, amount)
            it = trainer(per_device_train_batch_size=1, gradient_accumulation_steps=2)
            it.train()
            assert all(torch.isfinite(torch.tensor(log["loss"])) for log in it.state.log_history if "loss" in log)
            assert it.state.global_step == 16

    def test_a_token_id_past_the_embeddings_is_one_line(self, trainer):
        from datasets import Dataset

        it = trainer(train_dataset=Dataset.from_dict({"input_ids": [[5, 64]] * 8}))
        with pytest.raises(ValueError, match="token id 64, but the model has 64 embeddings"):
            it.rollout(0)

    @pytest.mark.parametrize("positions", [11, 12])
    def test_learned_positions_can_be_filled_to_the_last(self, trainer, positions):
        from datasets import Dataset
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=64, n_positions=positions, n_embd=32, n_layer=1, n_head=2, eos_token_id=1)
        rows = Dataset.from_dict({"prompt": ["w5 w6 w7 w8 w9"] * 8})
        it = trainer(model=GPT2LMHeadModel(config), train_dataset=rows, stop_token=None, max_steps=2)
        it.train()
        assert it.state.global_step == 2
        longer = trainer(model=GPT2LMHeadModel(config), train_dataset=rows, response_length=positions)
        with pytest.raises(
            ValueError, match=f"5 tokens and response_length {positions} exceed .* {positions} positions"
        ):
            longer.rollout(0)

    def test_data_seed_orders_the_prompts(self, trainer):
        assert trainer(data_seed=1).sample_prompts(0) != trainer(data_seed=2).sample_prompts(0)
        assert trainer(data_seed=1, seed=5).sample_prompts(0) == trainer(data_seed=1).sample_prompts(0)

    def test_does_not_depend_on_global_random_state(self, trainer):
        it = trainer()
        first = it.rollout(0)
        torch.rand(100)
        again = it.rollout(0)
        assert torch.equal(first.completion_ids, again.completion_ids)
        assert not torch.equal(first.completion_ids, it.rollout(1).completion_ids)


class TestScore:
    def test_old_log_probs_equal_a_plain_forward(self, trainer, model):
        """Independent oracle: one row at a time, no padding, full softmax."""
        it = trainer(temperature=0.9)
        scored = it.score(it.rollout(0))
        rollout = scored.rollout
        for row in range(8):
            prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
            answer = rollout.completion_ids[row][rollout.completion_mask[row]]
            with torch.no_grad():
                logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1] / 0.9
            expected = logits.log_softmax(-1)
            got = scored.old_per_token_logps[row][: len(answer)]
            torch.testing.assert_close(got, expected.gather(1, answer[:, None])[:, 0], atol=1e-5, rtol=0)
            entropy = -(expected.exp() * expected).sum(-1)
            torch.testing.assert_close(scored.entropies[row][: len(answer)], entropy, atol=1e-5, rtol=0)
            assert (scored.entropies[row] >= 0).all()
        padding = ~rollout.completion_mask
        assert scored.old_per_token_logps[padding].abs().sum() == 0

    def test_kl_is_zero_before_the_first_step(self, trainer):
        it = trainer()
        scored = it.score(it.rollout(0))
        assert torch.equal(scored.old_per_token_logps, scored.ref_per_token_logps)

    def test_missing_eos_penalty_spares_answers_that_any_stop_token_ended(self, trainer, model):
        """stop_token_id=7 with a penalty (trl#3750): an answer that 7 ended is not punished."""
        bias_logit(model, 7, 50.0)
        it = trainer(stop_token_id=7, missing_eos_penalty=3.0)
        scored = it.score(it.rollout(0))
        assert scored.rollout.finished.all()
        assert (scored.scores == 1.0).all()  # count_word counts w7 once

    def test_missing_eos_penalty_for_answers_without_an_end(self, trainer):
        it = trainer(stop_token=None, missing_eos_penalty=3.0)
        plain = trainer(stop_token=None)
        assert torch.equal(it.score(it.rollout(0)).scores, plain.score(plain.rollout(0)).scores - 3.0)

    def test_rows_without_any_opinion_train_nothing(self, trainer):
        def picky(completions, **kwargs):
            return [None if row % 2 else 1.0 for row, _ in enumerate(completions)]

        it = trainer(reward_funcs=picky)
        experience = it.advantages(it.score(it.rollout(0)))
        assert experience.scored.valid.tolist() == [True, False] * 4
        assert not experience.mask[1::2].any()
        assert experience.advantages[1::2].abs().sum() == 0
        assert it._flush_metrics()["objective/scores"] == 1.0

    def test_a_reward_without_any_opinion_trains_nothing_and_leaves_the_controller_alone(self, trainer):
        it = trainer(reward_funcs=lambda completions, **kwargs: [None] * len(completions), kl_target=1.0)
        before = [parameter.clone() for parameter in it.model.parameters()]
        it.train()
        assert all(torch.equal(old, new) for old, new in zip(before, it.model.parameters()))
        assert it.kl_controller.kl_coef == 0.05

    def test_a_reward_model_reads_the_markers_of_token_id_prompts(self, trainer, classifier):
        """Prompts that came as ids keep their special tokens, the answer its eos, as in TRL 1.12."""
        from datasets import Dataset

        rows = Dataset.from_dict({"input_ids": [[1, 5, 1, 9]] * 8})  # 1 is a special token of the tokenizer
        it = trainer(reward_model=classifier, train_dataset=rows)
        scored = it.score(it.rollout(0))
        for row in range(8):
            answer = scored.rollout.completion_ids[row][scored.rollout.completion_mask[row]]
            ids = torch.cat([torch.tensor([1, 5, 1, 9]), answer])[None]
            with torch.no_grad():
                expected = classifier.score(classifier.model(ids).last_hidden_state[:, -1])
            torch.testing.assert_close(scored.scores[row], expected[0, 0], atol=1e-5, rtol=0)

    def test_weights_of_several_rewards(self, trainer):
        def one(completions, **kwargs):
            return [1.0] * len(completions)

        def two(completions, **kwargs):
            return [2.0] * len(completions)

        it = trainer(reward_funcs=[one, two], reward_weights=[0.5, 2.0])
        assert it.score(it.rollout(0)).scores.tolist() == [4.5] * 8


class TestAdvantages:
    def test_the_score_stands_on_the_last_real_token(self, trainer):
        """Hand-made answers [5, 7, 1] and [5, 1] (trl#3750, #5303), also where pad is eos."""
        it = trainer(kl_coef=0.0)
        scored = it.score(it.rollout(0))
        mask = torch.zeros(8, 5, dtype=torch.bool)
        mask[0, :3] = mask[1:, :2] = True
        rollout = replace(scored.rollout, completion_mask=mask, completion_ids=torch.ones(8, 5, dtype=torch.long))
        zeros = torch.zeros(8, 5)
        scored = replace(
            scored,
            rollout=rollout,
            old_per_token_logps=zeros,
            ref_per_token_logps=zeros,
            values=zeros,
            entropies=zeros,
            scores=torch.arange(1.0, 9.0),
        )
        rewards = it.advantages(scored).token_rewards
        assert rewards[0].tolist() == [0, 0, 1, 0, 0]
        assert rewards[1].tolist() == [0, 2, 0, 0, 0]

    def test_whitened_over_valid_tokens(self, trainer):
        it = trainer()
        experience = it.advantages(it.score(it.rollout(0)))
        kept = experience.advantages[experience.mask].double()
        assert abs(float(kept.mean())) < 1e-6
        assert abs(float(kept.std()) - 1) < 1e-4

    def test_lam_critic_changes_the_value_targets_alone(self, trainer):
        plain, other = trainer(), trainer(lam_critic=1.0)
        scored = plain.score(plain.rollout(0))
        scored = replace(scored, values=torch.randn(scored.values.shape) * scored.rollout.completion_mask)
        first, second = plain.advantages(scored), other.advantages(scored)
        assert torch.equal(first.advantages, second.advantages)
        monte_carlo = first.token_rewards.flip(1).cumsum(1).flip(1) * first.mask
        torch.testing.assert_close(second.returns, monte_carlo, atol=1e-5, rtol=0)
        assert not torch.allclose(first.returns, second.returns)

    def test_adaptive_kl_reacts_after_the_update(self, trainer):
        it = trainer(kl_target=100.0, kl_horizon=8)
        it.train()
        coefficients = [log["objective/kl_coef"] for log in it.state.log_history if "objective/kl_coef" in log]
        assert coefficients == pytest.approx([0.05, 0.05 * 0.8])
        assert it.kl_controller.kl_coef == pytest.approx(0.05 * 0.8 * 0.8)


class TestLosses:
    def test_the_ratio_is_one_where_nothing_changed(self, trainer):
        """learning_rate 0, prompts of mixed lengths (trl#454): in every micro-batch and PPO epoch."""
        it = trainer(learning_rate=0.0, num_mini_batches=2, per_device_train_batch_size=2)
        ratios = []
        policy_loss = it.policy_loss

        def recorded(stats, chunk, experience, tokens):
            old = gather_rows(chunk, experience.scored.old_per_token_logps)
            mask = chunk.completion_mask
            ratios.append((stats.per_token_logps - old)[mask].exp())
            return policy_loss(stats, chunk, experience, tokens)

        it.policy_loss = recorded
        it.train()
        assert len(ratios) == 2 * 2 * 2 * 2
        assert max(float((ratio - 1).detach().abs().max()) for ratio in ratios) < 1e-5
        assert all(log["policy/approxkl_avg"] < 1e-10 for log in it.state.log_history if "policy/approxkl_avg" in log)

    def test_clip_high_reaches_the_loss(self, trainer):
        results = []
        for high in (None, 5.0):
            it = trainer(cliprange=1e-4, cliprange_high=high, num_mini_batches=2, seed=3)
            it.train()
            results.append([log["policy/clipfrac_avg"] for log in it.state.log_history if "policy/clipfrac_avg" in log])
        assert sum(results[1]) < sum(results[0])

    @pytest.mark.parametrize("critic", ["shared", "adapter"])
    def test_critic_warm_up_leaves_the_policy_alone(self, trainer, lora, critic):
        it = trainer(critic_warmup_steps=2, max_steps=2, peft_config=lora, critic=critic, weight_decay=0.1)
        before = {name: p.detach().clone() for name, p in it.model.named_parameters() if p.requires_grad}
        it.train()
        changed = {
            name for name, p in it.model.named_parameters() if name in before and not torch.equal(before[name], p)
        }
        assert changed
        assert all("value_head" in name or ".critic." in name for name in changed)


def test_kl_stays_under_the_target_only_with_control(trainer):
    """A reward that counts one token (trl#204): adaptive control keeps the KL near its target, none passes it."""
    last = {}
    for target in (None, 2.0):
        it = trainer(
            kl_target=target,
            kl_coef=0.0 if target is None else 0.2,
            kl_horizon=40,
            total_episodes=640,
            learning_rate=5e-3,
            num_mini_batches=2,
            lr_scheduler_type="constant",
        )
        it.train()
        kls = [log["objective/kl"] for log in it.state.log_history if "objective/kl" in log]
        last[target] = sum(kls[-10:]) / 10
    assert last[2.0] < 1.5 * 2.0
    assert last[None] > 1.5 * 2.0
