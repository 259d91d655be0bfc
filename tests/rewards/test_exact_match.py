import pytest

from trl_alpharl.rewards.exact_match import exact_match


def reward(text, answer):
    return exact_match([text], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5 + 7 is 12", "12"),
        ("so the total is $1,000.", 1000),
        ("about 0.50", "1/2"),
        ("that makes -3", -3),
        ("that makes \N{MINUS SIGN}3", "-3"),
        ("10-5", 5),
        ("1, 2, 3", 3),
        (".5", 0.5),
        ("1,2,3", 3),
        (r"12 apples, so \boxed{7}. Checked 3 times.", 7),
        (r"\boxed{1} no, \boxed{2}", "2"),
        ("reasoning 3 4\n#### 42", "42"),
        ("#### 42\n\nQuestion: is 7 odd?", "42"),
        ("#### Conclusion\nIt is 8", "8"),
        ("<think>9</think><answer> 10 </answer> bye 11", "10"),
        (r"\boxed{50\%}", "50"),
        ("she sold 48/2 = 24\n#### 24", "She sold 48/2 = <<48/2=24>>24 clips.\n#### 24"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<answer>  San\nMarino. </answer>", "san marino"),
        ("Paris", "paris"),
    ],
)
def test_right_answers(text, answer):
    assert reward(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "12"),
        ("no number here", "12"),
        ("12 and then 13", "12"),
        ("1/2", "2"),
        ("2 + 1/2", "2"),
        (r"\boxed{5} is not 7", "7"),
        (r"7 \boxed{unfinished", "8"),
        ("-3", "3"),
        ("1/0", "0"),
        ("I think it is Paris", "Paris"),
        ("<answer>Rome</answer>", "Paris"),
        ("12", "12 apples"),
    ],
)
def test_wrong_answers(text, answer):
    assert reward(text, answer) == 0.0


def test_rows_columns_and_chat():
    chat = [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
    assert exact_match(completions=chat, solution=["4", "4"], prompts=None, completion_ids=None) == [1.0, 0.0]
    assert exact_match(["4", "4"], answer=[None, 4]) == [None, 1.0]


def test_neither_column_is_an_error():
    with pytest.raises(ValueError, match="'answer' or 'solution'"):
        exact_match(["4"], question=["2+2"])


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "1," * 50_000, "<answer>" * 20_000, r"\boxed{" * 20_000, "####" * 30_000]
)
def test_repetitive_text_is_read_in_linear_time(text):  # a quadratic search would hang here for minutes
    assert reward(text, "42") == 0.0
