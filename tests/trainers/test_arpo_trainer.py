"""ARPOTrainer: PPO with everything off, and each mechanism's stage with that mechanism on."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from trl_alpharl.functional.advantages import compute_gae
from trl_alpharl.metrics_table import METRICS, describe

OFF = {"preset": "ppo"}
EVERYTHING = {
    "reward_scaling": "robust",
    "popart": True,
    "shaping_rewards": ["length"],
    "entropy_control": "pi",
    "entropy_form": "both",
    "entropy_coef_min": -0.05,
    "lam_end": 0.8,
    "advantage_norm": "ema",
    "explained_variance_gate": True,
    "kl_stop": 1e-4,
    "reuse_surge": 1.5,
    "positive_nll_coef": 0.1,
    "logit_noise": 0.3,
    "epsilon_mix": 0.1,
    "norm_noise": 0.01,
    "replay_ratio": 0.5,
    "curriculum": "success",
    "screening": 2,
}


def value(completions, **kwargs):
    """The mean word number of a completion, between 0 and 1: it differs between almost any two."""
    words = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(numbers) / (63 * max(1, len(numbers))) for numbers in words]


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def scored_of(run, index=0, **changes):
    return replace(run.score(run.rollout(index)), **changes)


def weights_of(run):
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


class TestPresetPPO:
    @pytest.mark.parametrize("adapter", [False, True])
    def test_is_ppo_bit_for_bit_over_20_steps(self, arpo, trainer, model, lora, run_state, assert_same, adapter):
        shared = {
            "total_episodes": 40,
            "num_mini_batches": 2,
            "kl_target": 0.5,
            "kl_horizon": 50,
            "missing_eos_penalty": 0.5,
            "reward_funcs": [value, length],
            "reward_weights": [1.0, 0.01],
        }
        if adapter:
            shared |= {
                "peft_config": copy.deepcopy(lora),
                "critic": "adapter",
                "lam_critic": 1.0,
                "critic_warmup_steps": 2,
            }
        plain = trainer(
            model=copy.deepcopy(model), **{**shared, "peft_config": copy.deepcopy(shared.get("peft_config"))}
        )
        ours = arpo(**OFF, **shared)
        for run in (plain, ours):
            run.train()
        assert plain.state.global_step == 20
        for part in ("weights", "optimizer", "scheduler", "logs"):
            assert_same(run_state(ours)[part], run_state(plain)[part], part)

    def test_swapping_the_class_keeps_the_script(self, arpo, dataset):
        """No ARPO field set: the defaults train, save and evaluate."""
        run = arpo(eval_dataset=dataset.select(range(3)))
        run.train()
        assert run.evaluate()["eval_objective/scores"] >= 0
        assert run.args.preset == "tuned" and run.args.num_mini_batches == 4


class TestScaling:
    @pytest.mark.parametrize("factor", [1e-3, 1e3])
    def test_the_unit_of_the_reward_changes_no_update(self, arpo, factor):
        """x1, x1e-3 and x1e3: the same weights to 1e-4 of what training moved them."""

        def scaled(completions, **kwargs):
            return [factor * reward for reward in value(completions)]

        settings = {**OFF, "reward_scaling": "robust", "total_episodes": 32, "num_mini_batches": 2, "seed": 3}
        runs = [arpo(**settings, reward_funcs=reward) for reward in (value, scaled)]
        start = weights_of(runs[0])
        for run in runs:
            run.train()
        plain, other = (run.model.state_dict() for run in runs)
        moved = max(float((plain[name] - start[name]).abs().max()) for name in start)
        apart = max(float((plain[name] - other[name]).abs().max()) for name in start)
        assert moved > 1e-3 and apart < 1e-4 * moved

    @pytest.mark.parametrize("scaling", ["robust", "running", "batch"])
    @pytest.mark.parametrize("constant", [0.1, -30.0])
    def test_a_constant_reward_moves_no_weight(self, arpo, scaling, constant):
        run = arpo(
            **OFF,
            reward_scaling=scaling,
            kl_coef=0.0,
            total_episodes=32,
            reward_funcs=lambda completions, **kwargs: [constant] * len(completions),
        )
        before = weights_of(run)
        run.train()
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())

    def test_with_a_kl_term_it_trains_as_a_reward_of_zero_does(self, arpo):
        runs = [
            arpo(
                **OFF,
                reward_scaling="robust",
                entropy_control="fixed",
                total_episodes=32,
                reward_funcs=lambda completions, constant=constant, **kwargs: [constant] * len(completions),
            )
            for constant in (0.0, 5.0)
        ]
        for run in runs:
            run.train()
        one, other = (run.model.state_dict() for run in runs)
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(tensor.isfinite().all() for tensor in one.values())

    def test_parts_are_scaled_one_by_one_then_weighted(self, arpo):
        """A second reward a million times as large does not drown the first."""

        def huge(completions, **kwargs):
            return [1e6 * reward for reward in value(completions)[::-1]]

        run = arpo(**OFF, reward_scaling="batch", reward_funcs=[value, huge], reward_weights=[2.0, 1.0], kl_coef=0.0)
        scored = scored_of(run)
        totals = run.advantages(scored).token_rewards.sum(1).double()
        parts = scored.rewards - scored.rewards.mean(0)
        expected = (parts / parts.square().mean(0).sqrt()) @ torch.tensor([2.0, 1.0], dtype=torch.float64)
        torch.testing.assert_close(totals, expected, rtol=1e-4, atol=1e-4)

    def test_outliers_stay_small_and_raw_scores_are_logged(self, arpo):
        def outlier(completions, **kwargs):
            return [1e6, *value(completions)[1:]]

        run = arpo(**OFF, reward_scaling="robust", reward_funcs=outlier, kl_coef=0.0)
        experience = run.advantages(scored_of(run))
        assert experience.token_rewards.abs().max() == 3.0
        assert run._flush_metrics()["objective/scores"] > 1e5

    def test_shaping_rewards_fade(self, arpo):
        run = arpo(
            **OFF, shaping_rewards=["length"], shaping_schedule="linear", reward_funcs=[value, length], kl_coef=0.0
        )
        for index, weight in enumerate([1.0, 0.5]):
            scored = scored_of(run, index)
            totals = run.advantages(scored).token_rewards.sum(1).double()
            torch.testing.assert_close(totals, scored.rewards @ torch.tensor([1.0, weight]).double(), rtol=1e-5, atol=0)

    def test_the_success_schedule_follows_those_that_do_not_only_shape(self, arpo):
        def always(completions, **kwargs):
            return [1.0] * len(completions)

        run = arpo(**OFF, shaping_rewards=["length"], reward_funcs=[always, length], total_episodes=32)
        run.train()
        weights = [entry["arpo/shaping_weight"] for entry in run.state.log_history if "arpo/shaping_weight" in entry]
        assert weights == pytest.approx([1.0, 0.9, 0.81, 0.729])


class TestAdvantages:
    def test_mu_equal_to_pi_changes_nothing(self, arpo):
        run = arpo(**OFF, replay_ratio=0.5)
        scored = scored_of(run)
        own = replace(scored, rollout=replace(scored.rollout, behavior_logps=scored.old_per_token_logps.clone()))
        plain, corrected = run.advantages(scored), run.advantages(own)
        assert torch.equal(plain.advantages, corrected.advantages)
        torch.testing.assert_close(plain.returns, corrected.returns, atol=1e-6, rtol=0)
        chunk = next(run.plan(scored.rollout)[0].chunks(scored.rollout, range(8)))
        losses = []
        for experience in (plain, corrected):
            stats = run.model(
                chunk.input_ids, chunk.attention_mask, chunk.position_ids, chunk.predict_at, chunk.completion_ids, 0.7
            )
            losses.append(run.policy_loss(stats, chunk, experience, torch.tensor(10.0))[0])
        assert losses[0] == losses[1]

    def test_importance_enters_the_policy_loss_once_and_is_cut(self, arpo):
        run = arpo(**OFF, replay_ratio=0.5, rho_max=1.5)
        scored = scored_of(run)
        chunk = next(run.plan(scored.rollout)[0].chunks(scored.rollout, range(8)))
        stats = run.model(
            chunk.input_ids, chunk.attention_mask, chunk.position_ids, chunk.predict_at, chunk.completion_ids, 0.7
        )
        losses = {}
        for shift in (0.0, -0.2, 5.0):
            rollout = replace(scored.rollout, behavior_logps=scored.old_per_token_logps - shift)
            experience = replace(run.advantages(scored), scored=replace(scored, rollout=rollout))
            losses[shift] = float(run.policy_loss(stats, chunk, experience, torch.tensor(10.0))[0].detach())
        assert losses[-0.2] == pytest.approx(losses[0.0] * torch.tensor(-0.2).exp().item(), rel=1e-4)
        assert losses[5.0] == pytest.approx(losses[0.0] * 1.5, rel=1e-4)

    def test_length_adaptive_lambda_is_the_policy_s_alone(self, arpo):
        plain, adaptive = arpo(**OFF), arpo(**OFF, lam_length_scale=0.5)
        scored = scored_of(plain)
        scored = replace(scored, values=torch.randn(scored.values.shape) * scored.rollout.completion_mask)
        first, second = plain.advantages(scored), adaptive.advantages(scored)
        assert torch.equal(first.returns, second.returns)
        lam = 1 - 1 / (0.5 * first.mask.sum(1).clamp(min=2))
        raw = compute_gae(first.token_rewards, scored.values, first.mask, 1.0, lam)[0]
        kept = raw[first.mask]
        expected = ((raw - kept.mean()) / kept.std()).masked_fill(~first.mask, 0)
        torch.testing.assert_close(second.advantages, expected, atol=1e-4, rtol=1e-4)

    def test_the_gate_replaces_a_critic_that_explains_nothing(self, arpo):
        run = arpo(**OFF, explained_variance_gate=True, reward_funcs=value, kl_coef=0.0)
        scored = scored_of(run)
        mask = scored.rollout.completion_mask
        noise = replace(scored, values=torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask)
        good = replace(scored, values=(scored.scores - 0.01).unsqueeze(1) * mask)
        totals = scored.scores.unsqueeze(1).expand_as(mask)
        kept = totals[mask]
        centered = ((totals - kept.mean()) / kept.std()).masked_fill(~mask, 0)
        torch.testing.assert_close(run.advantages(noise).advantages, centered, atol=1e-4, rtol=1e-3)
        assert run._flush_metrics()["arpo/critic_gated"] == 1
        assert not torch.allclose(run.advantages(good).advantages, centered, atol=0.1)
        assert run._flush_metrics()["arpo/critic_gated"] == 0

    def test_popart_keeps_what_the_critic_says_and_learns_in_its_units(self, arpo):
        def far(completions, **kwargs):
            return [1000 + 10 * reward for reward in value(completions)]

        run = arpo(**OFF, popart=True, lam=1.0, reward_funcs=far)
        torch.nn.init.normal_(run.model.value_head.weight, generator=torch.Generator().manual_seed(0))
        scored = scored_of(run)
        experience = run.advantages(scored)
        said = run.popart.denormalize(scored.values)
        run.after_update(experience)
        mask = experience.mask
        after = run.popart.denormalize(run.score(scored.rollout).values)
        torch.testing.assert_close(after[mask], said[mask], rtol=1e-3, atol=1e-2)
        assert run.popart.mean == pytest.approx(1003, abs=20)
        second = run.advantages(run.score(scored.rollout))
        assert second.returns[mask].abs().mean() < 5  # not 1000
        assert (second.returns[~mask] == 0).all()


class TestUpdates:
    def one_rollout(self, run):
        """Whether each optimizer step of the first rollout moved the policy, and the critic."""
        moved = []
        experience = run.advantages(run.score(run.rollout(0)))
        model = run._ready_for_own_loop()
        for step in range(run.args.steps_per_rollout):
            before = weights_of(run)
            run.training_step(model, run.mini_batch(experience, step))
            run.optimizer.step()
            model.zero_grad()
            run.state.global_step += 1
            after = run.model.state_dict()
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            moved.append((any("value_head" not in name for name in changed), "value_head.weight" in changed))
        return moved

    def test_after_a_kl_stop_the_critic_alone_goes_on(self, arpo):
        run = arpo(**OFF, kl_stop=1e-9, num_ppo_epochs=3, reward_funcs=value, learning_rate=1e-2)
        assert self.one_rollout(run) == [(True, True), (True, True), (False, True)]
        assert run._flush_metrics()["arpo/policy_steps"] == pytest.approx(2 / 3)

    def test_a_surge_of_the_gradient_drops_the_step(self, arpo):
        run = arpo(**OFF, reuse_surge=1.0001, num_ppo_epochs=3, reward_funcs=value, learning_rate=1e-2)
        run.gate.surge_factor = 1e-6  # every gradient is a surge
        assert self.one_rollout(run) == [(True, True), (False, False), (False, True)]
        assert run._flush_metrics()["arpo/dropped_steps"] == pytest.approx(1 / 2)

    def test_a_new_rollout_opens_the_gate(self, arpo):
        run = arpo(**OFF, kl_stop=1e-9, num_ppo_epochs=3, reward_funcs=value, learning_rate=1e-2)
        run.train()
        learned = [entry["arpo/policy_steps"] for entry in run.state.log_history if "arpo/policy_steps" in entry]
        assert learned == [1, 1, 0, 1, 1, 0]

    def test_the_entropy_bonus_raises_the_entropy(self, arpo):
        entropies = {}
        for coef in (-1.0, 1.0):
            run = arpo(**OFF, entropy_control="fixed", total_episodes=32, learning_rate=1e-2, kl_coef=0.0)
            run.entropy.coef = coef
            run.train()
            entropies[coef] = run.state.log_history[-2]["policy/entropy_avg"]
        assert entropies[1.0] > entropies[-1.0] + 0.05

    def test_positive_nll_raises_the_likelihood_of_successes_alone(self, arpo):
        """Without a policy gradient (constant rewards after scaling) only successes gain."""

        def half(completions, **kwargs):
            return [float(row % 2) for row, _ in enumerate(completions)]

        run = arpo(**OFF, positive_nll_coef=1.0, reward_funcs=half, learning_rate=1e-2, kl_coef=0.0)
        scored = scored_of(run)
        experience = run.advantages(scored)
        run.update(replace(experience, advantages=torch.zeros_like(experience.advantages)))
        gain = (run.score(scored.rollout).old_per_token_logps - scored.old_per_token_logps).sum(1)
        assert gain[1::2].min() > gain[0::2].max()


def test_every_metric_of_arpo_is_described_and_logged(arpo):
    keys = set()
    for changes in ({}, {"lam_end": None, "entropy_control": "dual", "kl_stop": 0.0}):
        run = arpo(**OFF, **{**EVERYTHING, **changes}, reward_funcs=[value, length], total_episodes=32)
        run.train()
        keys |= {key for entry in run.state.log_history for key in entry}
    assert [key for key in keys if describe(key) is None] == []
    found = [describe(key) for key in keys]
    assert [key for key, metric in METRICS.items() if key.startswith("arpo/") and metric not in found] == []


@pytest.mark.slow
def test_the_entropy_is_held_within_ten_percent_of_its_target_on_a_dense_reward(arpo):
    """Means of four rollouts, from where the reward has pulled the entropy down to its target; without control it falls
    far below. (The pure dual is an integrator: on a model this small it swings around the target.)"""

    def distances(**gains):
        run = arpo(
            **OFF,
            entropy_control="pi",
            **gains,
            entropy_coef=0.0,
            entropy_coef_max=1.0,
            entropy_start=0.9,
            entropy_end=0.5,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            total_episodes=16 * 140,
            num_mini_batches=2,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            temperature=1.0,
            kl_coef=0.0,
            logging_steps=4,
            reward_funcs=value,
            seed=8,
        )
        run.train()
        entries = [entry for entry in run.state.log_history if "arpo/entropy_target" in entry]
        off = [entry["policy/entropy_avg"] / entry["arpo/entropy_target"] - 1 for entry in entries]
        return [abs(sum(off[at : at + 4]) / 4) for at in range(64, len(off), 4)]

    assert max(distances(entropy_kp=4.0, entropy_ki=0.4)) < 0.1
    assert max(distances(entropy_kp=0.0, entropy_ki=0.0)) > 0.3
