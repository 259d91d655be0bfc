"""Our formulas against those of TRL 1.12's PPO trainer, written down again here, on one and the same rollout.

1.12 keeps most of its math inside `train()`. Its few importable functions are used themselves where TRL is 1.12.
First: equality where 1.12 is right, which is on completions of full length. Then: one test for each place where it is
wrong, with the value that it gives and the value that is right.
"""

import pytest
import torch

from trl_alpharl.functional.advantages import compute_gae
from trl_alpharl.functional.kl import per_token_kl
from trl_alpharl.functional.losses import clipped_surrogate_loss, clipped_value_loss
from trl_alpharl.functional.masking import masked_mean, masked_moments, score_positions, whiten
from trl_alpharl.functional.rewards import penalize_missing_eos, token_rewards

try:
    from trl.experimental.ppo import ppo_trainer as trl_1_12
except ImportError:
    trl_1_12 = None

pytestmark = pytest.mark.trl_compat
EOS, PAD = 1, 0
GAMMA, LAM, CLIP, KL_COEF = 0.99, 0.9, 0.2, 0.05


# ---- TRL 1.12, in other words ----------------------------------------------------------------------------------------


def old_mean(values, mask):
    return trl_1_12.masked_mean(values, mask) if trl_1_12 else (values * mask).sum() / mask.sum()


def old_whiten(values, mask, shift_mean=True):
    if trl_1_12:
        return trl_1_12.masked_whiten(values, mask, shift_mean)
    count = mask.sum()
    if count == 0:
        raise ValueError("an empty mask")
    mean = old_mean(values, mask)
    variance = old_mean((values - mean) ** 2, mask) * count / (count - 1)
    return (values - mean) / (variance + 1e-8).sqrt() + (0 if shift_mean else mean)


def old_truncate(answers, stop_id, pad_id):
    """Whatever follows the first stop id becomes padding."""
    if trl_1_12:
        return trl_1_12.truncate_response(stop_id, pad_id, answers)
    stops = (answers == stop_id).cumsum(1)
    return answers.masked_fill((stops - (answers == stop_id).long()) > 0, pad_id)


def old_last_token(answers, pad_id):
    """The index before the first padding *id*; the reward model's score is read there."""
    is_pad = answers == pad_id
    return torch.where(is_pad.any(1), is_pad.long().argmax(1), answers.shape[1]) - 1


def old_hidden(last, width, extra=0):
    """1.12's padding masks, True = ignored: extra=0 for the policy, extra=1 for values and rewards."""
    return torch.arange(width) > (last + extra).unsqueeze(1)


def old_kl(logps, ref_logps, estimator):
    log_ratio = ref_logps - logps
    return -log_ratio if estimator == "k1" else log_ratio.exp() - 1 - log_ratio


def old_token_rewards(scores, kl, last):
    rewards = -KL_COEF * kl
    at = torch.where(last + 1 < kl.shape[1], last + 1, last)
    rewards[torch.arange(len(scores)), at] += scores
    return rewards


def old_gae(rewards, values):
    advantage, reversed_advantages = 0.0, []
    for t in range(values.shape[1] - 1, -1, -1):
        after = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        advantage = rewards[:, t] + GAMMA * after - values[:, t] + GAMMA * LAM * advantage
        reversed_advantages.append(advantage)
    advantages = torch.stack(reversed_advantages[::-1], 1)
    return advantages, advantages + values


def old_policy_step(logps, old_logps, advantages, hidden):
    """Loss, share of clipped tokens, approximate KL and mean ratio of a micro-batch."""
    logps, old_logps = (x.masked_fill(hidden, 1.0) for x in (logps, old_logps))
    difference = logps - old_logps
    ratio = difference.exp()
    plain, held = -advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
    clipped = old_mean((held > plain).float(), ~hidden)
    return old_mean(torch.max(plain, held), ~hidden), clipped, 0.5 * (difference**2).mean(), ratio.mean()


def old_value_step(values, old_values, returns, hidden):
    values = values.masked_fill(hidden, 0)
    held = torch.clamp(values, old_values - CLIP, old_values + CLIP)
    plain, held = (values - returns) ** 2, (held - returns) ** 2
    return 0.5 * old_mean(torch.max(plain, held), ~hidden), old_mean((held > plain).float(), ~hidden)


def random_rows(rows, columns, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, generator=generator) for _ in range(count)]


# ---- Where 1.12 is right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_full_length_completions_give_the_same_rewards_advantages_returns_and_losses(seed, estimator, whiten_rewards):
    rows, columns = 5, 7
    logps, ref_logps, values, new_logps, new_values = random_rows(rows, columns, 5, seed)
    new_logps, new_values = logps + 0.3 * new_logps, values + 0.3 * new_values
    scores = random_rows(rows, 1, 1, seed + 10)[0][:, 0]
    mask, nothing = torch.ones(rows, columns, dtype=torch.bool), torch.zeros(rows, columns, dtype=torch.bool)

    kl = per_token_kl(logps, ref_logps, estimator)
    rewards = token_rewards(scores, kl, mask, KL_COEF)
    expected_rewards = old_token_rewards(scores, old_kl(logps, ref_logps, estimator), torch.full((rows,), columns - 1))
    if whiten_rewards:
        rewards = whiten(rewards, mask, masked_moments(rewards, mask), shift_mean=False)
        expected_rewards = old_whiten(expected_rewards, mask, shift_mean=False)
    torch.testing.assert_close(rewards, expected_rewards, atol=1e-5, rtol=1e-5)

    raw, returns = compute_gae(rewards, values, mask, GAMMA, LAM)
    expected_raw, expected_returns = old_gae(expected_rewards, values)
    torch.testing.assert_close(returns, expected_returns, atol=1e-5, rtol=1e-5)
    advantages = whiten(raw, mask, masked_moments(raw, mask))
    torch.testing.assert_close(advantages, old_whiten(expected_raw, mask), atol=1e-5, rtol=1e-5)

    policy = clipped_surrogate_loss(new_logps, logps, advantages, mask, CLIP, CLIP, mask.sum())
    value = clipped_value_loss(new_values, values, returns, mask, CLIP, mask.sum())
    tokens = rows * columns
    found = [policy.loss, *(x / tokens for x in (policy.clipped_count, policy.approx_kl_sum, policy.ratio_sum))]
    found += [value.loss, value.clipped_count / tokens]
    expected = [*old_policy_step(new_logps, logps, advantages, nothing)]
    expected += old_value_step(new_values, values, returns, nothing)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert 0 < policy.clipped_count < tokens and 0 < value.clipped_count < tokens


def test_the_policy_loss_of_padded_completions_is_the_same_too():
    mask = torch.arange(6) < torch.tensor([[2], [6], [4]])
    logps, old_logps, advantages = random_rows(3, 6, 3)
    ours = clipped_surrogate_loss(logps, old_logps, advantages, mask, CLIP, CLIP, mask.sum())
    expected, clipped, _, _ = old_policy_step(logps, old_logps, advantages, ~mask)
    torch.testing.assert_close(ours.loss, expected)
    torch.testing.assert_close(ours.clipped_count / mask.sum(), clipped)


# ---- Where 1.12 is wrong ---------------------------------------------------------------------------------------------


def test_wrong_pad_equal_to_eos_loses_the_eos():
    """Case 10: the score is read before the eos, and the eos gets no gradient."""
    answers, mask = torch.tensor([[5, EOS, EOS, EOS]]), torch.tensor([[True, True, False, False]])
    last = old_last_token(old_truncate(answers, EOS, pad_id=EOS), pad_id=EOS)
    assert last.tolist() == [0]
    assert score_positions(mask).tolist() == [1]

    logps = torch.zeros(1, 4, requires_grad=True)
    old_policy_step(logps, torch.zeros(1, 4), torch.ones(1, 4), old_hidden(last, 4))[0].backward()
    assert logps.grad.tolist() == [[-1, 0, 0, 0]]
    logps.grad = None
    clipped_surrogate_loss(logps, torch.zeros(1, 4), torch.ones(1, 4), mask, CLIP, CLIP, 2).loss.backward()
    assert logps.grad.tolist() == [[-0.5, -0.5, 0, 0]]


def test_wrong_score_is_placed_one_past_the_end():
    """Case 6: on a padding position; the last token then gets gamma lam of its own score."""
    answers, mask = torch.tensor([[5, 7, EOS, PAD, PAD]]), torch.tensor([[True, True, False, False, False]])
    last = old_last_token(old_truncate(answers, 7, PAD), PAD)
    scores, zeros = torch.tensor([10.0]), torch.zeros(1, 5)
    theirs, ours = old_token_rewards(scores, zeros, last), token_rewards(scores, zeros, mask, KL_COEF)
    assert theirs.tolist() == [[0, 0, 10, 0, 0]]
    assert ours.tolist() == [[0, 10, 0, 0, 0]]
    assert old_gae(theirs, zeros)[0][0, 1].item() == pytest.approx(GAMMA * LAM * 10)
    assert compute_gae(ours, zeros, mask, GAMMA, LAM)[0][0, 1].item() == 10


def test_wrong_an_answer_ended_by_the_users_stop_id_is_punished():
    """Case 6: the stop id is not the eos, so 1.12 finds no eos."""
    truncated = old_truncate(torch.tensor([[5, 7, EOS, PAD, PAD]]), 7, PAD)
    assert not (truncated == EOS).any()  # what 1.12 subtracts the penalty by
    assert penalize_missing_eos(torch.tensor([2.0]), finished=torch.tensor([True]), penalty=1.0).tolist() == [2]


def test_wrong_the_value_of_the_first_padding_position_enters_the_advantages():
    """Case 7: rows of lengths 1, 2, 6; values past the end 1e3."""
    lengths = torch.tensor([1, 2, 6])
    mask = torch.arange(6) < lengths.unsqueeze(1)
    rewards, values = (x.masked_fill(~mask, 0) for x in random_rows(3, 6, 2))
    garbled = values.masked_fill(~mask, 1e3).masked_fill(old_hidden(lengths - 1, 6, extra=1), 0)
    theirs, _ = old_gae(rewards, garbled)
    expected, _ = old_gae(rewards, values)
    assert torch.all((theirs - expected)[:2, 0].abs() > 50) and torch.equal(theirs[2], expected[2])
    ours, _ = compute_gae(rewards, values.masked_fill(~mask, 1e3), mask, GAMMA, LAM)
    torch.testing.assert_close(ours, expected)


def test_wrong_the_value_loss_trains_the_first_padding_position():
    mask = torch.tensor([[True, True, False, False]])
    values = torch.ones(1, 4, requires_grad=True)
    zeros, hidden = torch.zeros(1, 4), old_hidden(torch.tensor([1]), 4, extra=1)
    old_value_step(values, zeros + 1, zeros, hidden)[0].backward()
    assert values.grad[0, 2] != 0
    values.grad = None
    clipped_value_loss(values, zeros + 1, zeros, mask, CLIP, 2).loss.backward()
    assert values.grad.tolist() == [[0.5, 0.5, 0, 0]]


def test_wrong_whitened_rewards_count_one_padding_position_a_row():
    mask = torch.tensor([[True, True, False, False]])
    rewards = torch.tensor([[1.0, 3.0, 0.0, 0.0]])
    theirs = old_whiten(rewards, ~old_hidden(torch.tensor([1]), 4, extra=1), shift_mean=False)
    ours = whiten(rewards, mask, masked_moments(rewards, mask), shift_mean=False)
    assert ours[0, :2].mean().item() == pytest.approx(2)  # the mean is kept
    assert theirs[0, :2].mean().item() != pytest.approx(2, abs=1e-2)


@pytest.mark.parametrize("width", [4, 8])
def test_wrong_padding_dilutes_approx_kl_ratio_and_entropy(width):
    """Case 26: twice the response length, the same answer of two tokens, other metrics."""
    mask = (torch.arange(width) < 2).unsqueeze(0)
    logps, zeros = torch.full((1, width), -0.5), torch.zeros(1, width)
    _, _, approx_kl, ratio = old_policy_step(logps, zeros, zeros, ~mask)
    assert approx_kl.item() == pytest.approx(0.125 * 2 / width)
    assert ratio.item() == pytest.approx((2 * 0.60653066 + width - 2) / width)
    ours = clipped_surrogate_loss(logps, zeros, zeros, mask, CLIP, CLIP, 2)
    assert ours.approx_kl_sum.item() / 2 == pytest.approx(0.125)
    assert ours.ratio_sum.item() / 2 == pytest.approx(0.60653066)
    entropies = torch.ones(1, width).masked_fill(~mask, 9.0)  # what the model says after the end
    assert masked_mean(entropies, mask).item() == 1 != entropies.mean().item()


@pytest.mark.parametrize("count", [0, 1])
def test_wrong_whitening_fewer_than_two_tokens(count):
    """Case 11: nothing left to whiten stops 1.12's run, one token makes NaN."""
    values, mask = torch.ones(3), torch.arange(3) < count
    if count == 0:
        with pytest.raises(ValueError):
            old_whiten(values, mask)
    else:
        assert old_whiten(values, mask).isnan().all()
    assert whiten(values, mask, masked_moments(values, mask)).tolist() == [0, 0, 0]


def test_wrong_a_micro_batch_of_empty_answers_has_loss_nan():
    """Case 11."""
    zeros, mask = torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    assert old_policy_step(zeros, zeros, zeros, ~mask)[0].isnan()
    assert clipped_surrogate_loss(zeros, zeros, zeros, mask, CLIP, CLIP, 0).loss.item() == 0


def test_wrong_nan_under_the_mask_leaks():
    values, mask = torch.tensor([1.0, float("nan")]), torch.tensor([True, False])
    assert old_mean(values, mask).isnan()
    assert masked_mean(values, mask).item() == 1


def test_wrong_every_estimator_but_k1_is_k3():
    logps, ref_logps = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert torch.equal(old_kl(logps, ref_logps, "k2"), old_kl(logps, ref_logps, "k3"))
    assert per_token_kl(logps, ref_logps, "k2").item() == 2


def test_wrong_a_token_weighs_more_in_a_micro_batch_of_short_answers():
    """1.12 averages the means of micro-batches; a row alone or beside a long one then trains differently."""
    mask = torch.arange(3) < torch.tensor([[1], [3]])
    zeros, advantages = torch.zeros(2, 3), torch.tensor([[1.0, 0, 0], [0.0, 0, 0]])
    together = old_policy_step(zeros, zeros, advantages, ~mask)[0]
    apart = sum(old_policy_step(zeros[i], zeros[i], advantages[i], ~mask[i])[0] for i in ([0], [1])) / 2
    assert (together.item(), apart.item()) == (-0.25, -0.5)
    ours = [clipped_surrogate_loss(zeros[i], zeros[i], advantages[i], mask[i], CLIP, CLIP, 4).loss for i in ([0], [1])]
    assert sum(ours).item() == -0.25
