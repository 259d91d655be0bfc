import pytest
import torch

from trl_alpharl.functional.rewards import combine_rewards, penalize_missing_eos, token_rewards

NAN = float("nan")


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e3])
def test_the_score_lands_on_the_last_token_and_nowhere_else(garbage):
    # Answers [5, 7], [5], and an empty one, whose score may be anything.
    mask = torch.tensor([[True, True, False, False], [True, False, False, False], [False] * 4])
    kl = torch.full((3, 4), 2.0).masked_fill(~mask, garbage)
    rewards = token_rewards(torch.tensor([10.0, 20.0, garbage]), kl, mask, kl_coef=0.25)
    assert rewards.tolist() == [[-0.5, 9.5, 0, 0], [19.5, 0, 0, 0], [0, 0, 0, 0]]


def test_an_answer_of_full_length_is_scored_on_its_last_token():
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert token_rewards(torch.tensor([7.0]), torch.zeros(1, 3), mask, 0.1).tolist() == [[0, 0, 7]]


def test_case_6_and_10_only_the_mask_decides_never_a_token_id():
    # [5, 7] ended by the user's stop id 7, and [5, 1] where 1 is eos and pad: the sampler's masks are the same.
    mask = torch.tensor([[True, True, False, False, False], [True, True, False, False, False]])
    rewards = token_rewards(torch.tensor([3.0, 4.0]), torch.zeros(2, 5), mask, 0.1)
    assert rewards.nonzero().tolist() == [[0, 1], [1, 1]]


def test_missing_eos_is_punished_once_a_row():
    finished = torch.tensor([True, False])
    assert penalize_missing_eos(torch.tensor([1.0, -1.0]), finished, 0.5).tolist() == [1.0, -1.5]


def test_combine_sums_the_opinions_that_exist():
    rewards = torch.tensor([[1.0, 10.0], [NAN, 10.0], [1.0, NAN], [NAN, NAN]])
    scores, valid = combine_rewards(rewards, torch.tensor([2.0, 0.5]))
    assert scores.tolist() == [7.0, 5.0, 2.0, 0.0]
    assert valid.tolist() == [True, True, True, False]


def test_combine_does_not_hide_an_infinite_reward():
    scores, valid = combine_rewards(torch.tensor([[float("inf"), 1.0]]), torch.ones(2))
    assert scores.isinf().all() and valid.all()


def test_combine_wants_one_weight_a_reward():
    with pytest.raises(ValueError, match="reward_weights: found 3, must be one for each of 2 rewards"):
        combine_rewards(torch.zeros(4, 2), torch.ones(3))
