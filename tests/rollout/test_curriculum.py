from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from trl_alpharl.rollout.curriculum import PromptCurriculum, screened_places, screening_groups


def test_every_prompt_is_tried_before_anything_is_known():
    curriculum = PromptCurriculum(12, target=0.5, width=0.25)
    assert sorted(curriculum.rows(12, index=0, seed=0)) == list(range(12))


def test_prompts_near_the_target_come_more_often():
    curriculum = PromptCurriculum(3, target=0.5, width=0.25)
    for _ in range(30):  # never, half of the time, always
        curriculum.record([0, 1, 2], [0.0, 0.0, 1.0])
        curriculum.record([0, 1, 2], [0.0, 1.0, 1.0])
    counts = Counter(curriculum.rows(1, index, seed=0)[0] for index in range(600))
    assert counts[1] / 600 == pytest.approx(1 / (1 + 2 * 0.135), abs=0.06)
    assert counts[0] > 0 and counts[2] > 0


def test_draws_repeat_by_index_until_something_is_recorded():
    curriculum = PromptCurriculum(50, target=0.5, width=0.1)
    curriculum.record(range(50), [float(row % 2) for row in range(50)])
    rows = curriculum.rows(8, 3, seed=1)
    assert rows == curriculum.rows(8, 3, seed=1)
    assert rows != curriculum.rows(8, 4, seed=1) and rows != curriculum.rows(8, 3, seed=2)


def test_a_safetensors_file_brings_it_back(tmp_path):
    curriculum = PromptCurriculum(5, target=0.5, width=0.25)
    curriculum.record([1, 1, 4], [1.0, 1.0, 0.0])
    save_file(curriculum.tensors(), tmp_path / "curriculum.safetensors")
    back = PromptCurriculum(5, target=0.5, width=0.25)
    back.load_tensors(load_file(tmp_path / "curriculum.safetensors"))
    back.record([1], [0.0])
    curriculum.record([1], [0.0])
    assert torch.equal(back.success, curriculum.success) and torch.equal(back.tries, curriculum.tries)
    with pytest.raises(ValueError, match="train_dataset has 4 rows; the run that saved its curriculum had 5"):
        PromptCurriculum(4, 0.5, 0.25).load_tensors(load_file(tmp_path / "curriculum.safetensors"))


def test_screening_spreads_what_is_left_over_prompts_that_pass():
    outcomes = torch.tensor([[True, False], [True, True], [False, True], [False, False]])
    assert screened_places(outcomes, 5) == [0, 2, 0, 2, 0]
    assert screened_places(torch.zeros(3, 2, dtype=torch.bool), 4) == [0, 1, 2, 0]
    assert screening_groups([7, 3], 3) == [7, 7, 7, 3, 3, 3]
