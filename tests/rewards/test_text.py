import pytest

from trl_alpharl.rewards.text import completion_text


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([{"role": "assistant", "content": "hello"}], "hello"),
        ([{"role": "tool", "content": "42"}, {"role": "assistant", "content": "it is 42"}], "it is 42"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}], "a b"),
        ([{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "a cat"}]}], "a cat"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([], ""),
    ],
)
def test_text_of_a_completion(completion, text):
    assert completion_text(completion) == text
