"""The quickstart's reward: distinct positive words minus negative ones, bounded, for texts and chat turns."""

import subprocess
import sys

import pytest

from trl_alpharl.builtin.corpus import stories
from trl_alpharl.builtin.reward import positive_words


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("", 0.0),
        (" was hot. Everyone was awake.", 0.0),
        (" and felt happy.", 1.0),
        ("Happy, happy, HAPPY!", 1.0),
        ("She was happy and proud.", 2.0),
        ("He was sad, sad.", -2.0),
        ("She was happy. It was awful.", 0.0),
        ("happy proud glad lovely kind", 3.0),
        ("sad rude awful stale grim", -3.0),
        ("unhappy", 0.0),
    ],
)
def test_counts(completion, expected):
    assert positive_words(prompts=[""], completions=[completion]) == [expected]


def test_the_last_chat_turn_is_read_and_the_prompt_is_not():
    turns = [
        [{"role": "assistant", "content": "It was a lovely, sunny day."}],
        [{"role": "assistant", "content": "sad"}, {"role": "assistant", "content": "glad"}],
    ]
    prompts = [[{"role": "user", "content": "awful terrible"}]] * 2
    assert positive_words(prompts=prompts, completions=turns) == [2.0, 1.0]


def test_extra_columns_are_ignored():
    scores = positive_words(prompts=["a"], completions=["glad"], completion_ids=[[1]], trainer_state=None, label=["x"])
    assert scores == [1.0]
    assert type(scores[0]) is float


def test_the_corpus_scores_in_the_middle():
    scores = positive_words(prompts=[], completions=stories(2000, seed=4))
    assert abs(sum(scores) / len(scores)) < 0.2
    assert {-3.0, 0.0, 3.0} <= set(scores)


def test_it_needs_no_torch():
    code = "import sys; from trl_alpharl.builtin import positive_words; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
