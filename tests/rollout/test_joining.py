from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trl_alpharl.records import Rollout
from trl_alpharl.rollout.joining import join_rollouts


def rollout_of(prompt: list[int], completion: list[int], **changes) -> Rollout:
    values = {
        "index": 2,
        "prompt_ids": torch.tensor([prompt]),
        "prompt_mask": torch.ones(1, len(prompt), dtype=torch.bool),
        "completion_ids": torch.tensor([completion]),
        "completion_mask": torch.ones(1, len(completion), dtype=torch.bool),
        "finished": torch.tensor([len(completion) > 1]),
        "examples": [{"prompt": str(prompt)}],
    }
    return Rollout(**{**values, **changes})


def test_rows_keep_their_tokens_in_one_padding():
    joined = join_rollouts(rollout_of([5], [6, 7, 8]), rollout_of([2, 3], [4]), pad_id=9)
    assert joined.prompt_ids.tolist() == [[9, 5], [2, 3]]
    assert joined.prompt_mask.tolist() == [[False, True], [True, True]]
    assert joined.completion_ids.tolist() == [[6, 7, 8], [4, 9, 9]]
    assert joined.completion_mask.tolist() == [[True] * 3, [True, False, False]]
    assert joined.finished.tolist() == [True, False]
    assert [row["prompt"] for row in joined.examples] == ["[5]", "[2, 3]"]
    assert joined.behavior_logps is joined.known_rewards is joined.dataset_rows is None


def test_rows_of_the_policy_itself_are_told_by_nan():
    explored = rollout_of([5], [6], behavior_logps=torch.tensor([[-1.5]]))
    joined = join_rollouts(rollout_of([5], [6, 7]), explored, 0)
    assert joined.behavior_logps[0].isnan().all() and joined.behavior_logps[1].tolist() == [-1.5, 0.0]


def test_what_is_known_and_what_is_replayed_comes_last():
    known = torch.tensor([[1.0]], dtype=torch.float64)
    plain, sure = rollout_of([5], [6]), rollout_of([5], [6], known_rewards=known)
    again = replace(sure, replayed=1)
    joined = join_rollouts(join_rollouts(plain, sure, 0), again, 0)
    assert joined.known_rewards.tolist() == [[1.0], [1.0]] and (joined.replayed, joined.fresh) == (1, 2)
    for first, second in ((sure, plain), (again, sure), (again, plain)):
        with pytest.raises(ValueError, match="rows that are known or replayed must come last"):
            join_rollouts(first, second, 0)
