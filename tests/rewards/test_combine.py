import math

import pytest

from trl_alpharl.rewards.combine import Combined
from trl_alpharl.rewards.runner import RewardRunner


def length(completions, **kwargs):
    return [len(text) for text in completions]


async def only_first(completions, **kwargs):
    return [10.0] + [None] * (len(completions) - 1)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def test_weighted_sum_skips_rows_without_an_opinion():
    reward = Combined([length, only_first, nothing], weights=[0.5, 2.0, 100.0])
    assert reward(prompts=["", ""], completions=["ab", "abcd"], completion_ids=[[1], [2]], other=[0, 0]) == [21.0, 2.0]
    assert Combined([nothing, nothing])(prompts=[""], completions=["a"]) == [None]


def test_a_nan_is_not_hidden():
    assert math.isnan(Combined([length, lambda completions: [math.nan]])(prompts=[""], completions=["a"])[0])


def test_columns_pass_through_and_it_nests():
    def graded(completions, answer, trainer_state):
        assert trainer_state == "state"
        return answer

    inner = Combined([graded, length])
    outer = RewardRunner([Combined([inner, inner], weights=[1, 2])])
    table = outer([""], ["abc"], [[1]], {"answer": [4.0]}, {"trainer_state": "state"})
    assert table.values == [[21.0]] and table.names == ["Combined"]


def test_wrong_number_of_weights():
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2"):
        Combined([length, nothing], weights=[1.0])
