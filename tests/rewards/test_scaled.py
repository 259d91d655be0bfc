import json
import math

import pytest

from trl_alpharl.rewards.combine import Combined
from trl_alpharl.rewards.runner import RewardRunner, reward_name
from trl_alpharl.rewards.scaled import RobustScaled


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def slowly(completions, answer, **kwargs):
    return [None if text == "" else 1000.0 * len(text) + answer[0] for text in completions]


TEXTS = ["a" * size for size in range(1, 10)]


def test_a_batch_by_hand():
    """Lengths 1..9: median 5, quartiles 3 and 7."""
    scaled = RobustScaled(length)(prompts=[""] * 9, completions=TEXTS)
    assert scaled == pytest.approx([(size - 5) / (4 / 1.349) for size in range(1, 10)])


def test_outliers_are_clipped_and_leave_the_others_apart():
    scaled = RobustScaled(length)(prompts=[""] * 10, completions=[*TEXTS, "a" * 100_000])
    assert scaled[-1] == 3.0
    assert scaled[:9] == sorted(scaled[:9]) and scaled[8] - scaled[0] > 2


def test_async_rewards_columns_and_no_opinion():
    reward = RobustScaled(slowly)
    scaled = reward(prompts=[""] * 4, completions=["a", "", "ab", "abc"], completion_ids=[[1]] * 4, answer=[7.0] * 4)
    assert scaled[1] is None and scaled[2] == 0.0 and scaled[3] == -scaled[0] > 0


def test_the_statistics_follow_a_drift():
    reward = RobustScaled(length)
    for factor in (1, 100, 10_000):
        texts = ["a" * (factor * size) for size in range(1, 10)]
        for _ in range(3):
            scaled = reward(prompts=[""] * 9, completions=texts)
        assert scaled == pytest.approx([(size - 5) / (4 / 1.349) for size in range(1, 10)], rel=1e-3, abs=1e-3)


def test_a_nan_is_not_hidden():
    scaled = RobustScaled(lambda completions, **kwargs: [math.nan, 1.0, 2.0])(prompts=[""] * 3, completions=[""] * 3)
    assert math.isnan(scaled[0]) and all(math.isfinite(number) for number in scaled[1:])


def test_it_has_a_name_of_its_own_and_goes_into_a_sum():
    reward = RobustScaled(length)
    assert reward_name(reward) == "scaled_length"
    both = Combined([reward, RobustScaled(slowly)], weights=[1.0, 2.0])
    table = RewardRunner([both])([""] * 9, TEXTS, [[1]] * 9, {"answer": [0.0] * 9})
    middle = [row[0] for row in table.values]
    assert middle == pytest.approx([3 * (size - 5) / (4 / 1.349) for size in range(1, 10)])


def test_the_state_goes_on():
    straight, resumed = RobustScaled(length), RobustScaled(length)
    straight(prompts=[""] * 9, completions=TEXTS)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    more = {"prompts": [""] * 3, "completions": ["aa", "aaa", "aaaaaaaa"]}
    assert straight(**more) == resumed(**more)
