"""The trainer's arithmetic on a hand-made rollout, against plain Python floats, row by row and token by token.

The rows are 1, 2, 5 and 6 tokens long; the third has no reward. Padding holds 1e3 wherever it may hold anything.
"""

import math
import statistics

import pytest
import torch

from trl_alpharl.records import Rollout, Scored, TokenStats
from trl_alpharl.rollout.scoring import gather_rows

pytestmark = pytest.mark.trl_compat
LENGTHS, WIDTH, PROMPT = (1, 2, 5, 6), 6, 3
VALID = (True, True, False, True)
GAMMA, LAM, LAM_CRITIC, KL_COEF, LOW, HIGH, VALUE_CLIP = 0.9, 0.8, 0.95, 0.3, 0.1, 0.25, 0.2
SCORES = (2.0, -1.0, 0.0, 0.5)


@pytest.fixture
def run(trainer):
    return trainer(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gamma=GAMMA,
        lam=LAM,
        lam_critic=LAM_CRITIC,
        kl_coef=KL_COEF,
        cliprange=LOW,
        cliprange_high=HIGH,
        cliprange_value=VALUE_CLIP,
    )


@pytest.fixture
def numbers():
    """old, new and reference log-probs, old and new values: (4, 6) each, padding included."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(5, 4, WIDTH, generator=generator)
    drawn[[0, 2]] = -drawn[[0, 2]].abs()
    drawn[1] = drawn[0] + 0.3 * drawn[1]
    return drawn.masked_fill(~mask(), 1e3)


def mask():
    return torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)


def scored_rollout(numbers):
    old, _, reference, values, _ = numbers.masked_fill(~mask(), 0)  # records hold 0 at padding
    rollout = Rollout(
        index=0,
        prompt_ids=torch.full((4, PROMPT), 9),
        prompt_mask=torch.ones(4, PROMPT, dtype=torch.bool),
        completion_ids=torch.full((4, WIDTH), 5),
        completion_mask=mask(),
        finished=torch.ones(4, dtype=torch.bool),
        examples=[{"prompt": "w9 w9 w9"}] * 4,
    )
    return Scored(
        rollout=rollout,
        old_per_token_logps=old,
        ref_per_token_logps=reference,
        values=values,
        entropies=torch.ones_like(old),
        scores=torch.tensor(SCORES),
        valid=torch.tensor(VALID),
        finite=True,
    )


def by_hand(numbers):
    """Token rewards, raw advantages and value targets of the valid rows, as lists of rows."""
    old, _, reference, values, _ = numbers.tolist()
    rewards, advantages, returns = {}, {}, {}
    for row in (0, 1, 3):
        tokens = range(LENGTHS[row])
        rewards[row] = [-KL_COEF * (old[row][t] - reference[row][t]) for t in tokens]
        rewards[row][-1] += SCORES[row]
        after = [*values[row][1 : LENGTHS[row]], 0.0]
        errors = [rewards[row][t] + GAMMA * after[t] - values[row][t] for t in tokens]
        for lam, into in ((LAM, advantages), (LAM_CRITIC, returns)):
            into[row] = [sum((GAMMA * lam) ** (s - t) * errors[s] for s in tokens if s >= t) for t in tokens]
        returns[row] = [advantage + values[row][t] for t, advantage in enumerate(returns[row])]
    return rewards, advantages, returns


def whitened(advantages):
    everything = [x for row in advantages.values() for x in row]
    mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
    return {row: [(x - mean) / deviation for x in entries] for row, entries in advantages.items()}


def rows_of(tensor):
    return {row: tensor[row, : LENGTHS[row]].tolist() for row in (0, 1, 3)}


def close(found, expected):
    assert found.keys() == expected.keys()
    for row in expected:
        assert found[row] == pytest.approx(expected[row], abs=1e-5), row


def test_rewards_advantages_and_returns(run, numbers):
    experience = run.advantages(scored_rollout(numbers))
    rewards, advantages, returns = by_hand(numbers)
    close(rows_of(experience.token_rewards), rewards)
    close(rows_of(experience.advantages), whitened(advantages))
    close(rows_of(experience.returns), returns)
    for tensor in (experience.token_rewards, experience.advantages):
        assert not tensor[~experience.mask].any()
    assert experience.mask.sum(1).tolist() == [1, 2, 0, 6]


def test_metrics_of_the_rollout_are_means_over_the_rows_with_a_reward(run, numbers):
    run.advantages(scored_rollout(numbers))
    logged = run.metrics.flush()
    old, _, reference, _, _ = numbers.tolist()
    rows = (0, 1, 3)
    kl = [sum(old[r][t] - reference[r][t] for t in range(LENGTHS[r])) for r in rows]
    entropy = [-sum(old[r][t] for t in range(LENGTHS[r])) for r in rows]
    assert logged["objective/scores"] == pytest.approx(1.5 / 3)
    assert logged["objective/kl"] == pytest.approx(sum(kl) / 3, abs=1e-5)
    assert logged["objective/entropy"] == pytest.approx(sum(entropy) / 3, abs=1e-5)
    assert logged["objective/non_score_reward"] == pytest.approx(-KL_COEF * sum(kl) / 3, abs=1e-5)
    assert logged["objective/rlhf_reward"] == pytest.approx((1.5 - KL_COEF * sum(kl)) / 3, abs=1e-5)
    assert logged["completions/mean_length"] == 14 / 4


def test_the_chunks_losses_add_up_to_the_means_over_the_mini_batchs_tokens(run, numbers):
    experience = run.advantages(scored_rollout(numbers))
    old, new, _, values, new_values = numbers.tolist()
    _, raw, returns = by_hand(numbers)
    advantages = whitened(raw)
    policy, value, clipped, value_clipped, sides = [], [], [], [], set()
    for row in (0, 1, 3):
        for t in range(LENGTHS[row]):
            ratio = math.exp(new[row][t] - old[row][t])
            plain, held = (-advantages[row][t] * r for r in (ratio, min(max(ratio, 1 - LOW), 1 + HIGH)))
            policy.append(max(plain, held))
            sides.add((held > plain) * (1 if ratio > 1 else -1))
            clipped.append(held > plain)
            near = min(max(new_values[row][t], values[row][t] - VALUE_CLIP), values[row][t] + VALUE_CLIP)
            errors = [(v - returns[row][t]) ** 2 for v in (new_values[row][t], near)]
            value.append(max(errors) / 2)
            value_clipped.append(errors[1] > errors[0])

    rollout, tokens = experience.scored.rollout, experience.mask.sum()
    totals = {}
    chunks = list(run.plan(rollout)[0].chunks(rollout, range(4)))
    assert len(chunks) > 1
    for chunk in chunks:
        stats = TokenStats(gather_rows(chunk, numbers[1]), None, gather_rows(chunk, numbers[4]))
        for loss in (run.policy_loss, run.value_loss):
            for name, part in loss(stats, chunk, experience, tokens)[1].items():
                totals[name] = totals.get(name, 0.0) + float(part)
    assert totals["loss/policy_avg"] == pytest.approx(statistics.fmean(policy), abs=1e-5)
    assert totals["loss/value_avg"] == pytest.approx(statistics.fmean(value), abs=1e-5)
    assert totals["policy/clipfrac_avg"] == pytest.approx(statistics.fmean(clipped))
    assert totals["val/clipfrac_avg"] == pytest.approx(statistics.fmean(value_clipped))
    assert sides == {-1, 0, 1} and 0 < sum(value_clipped) < len(value_clipped)  # the draw has every case in it
