import inspect
import subprocess
import sys

import pytest

from trl_alpharl.rewards import REWARD_FUNCS, get_reward


@pytest.mark.parametrize("name", REWARD_FUNCS)
def test_every_entry_is_a_reward_function(name):
    if name == "positive_words":
        pytest.importorskip("trl_alpharl.builtin.reward")
    if name == "vader_sentiment":
        pytest.importorskip("vaderSentiment")
    reward = get_reward(name)
    assert inspect.getdoc(reward)
    arguments = {
        "prompts": ["one", [{"role": "user", "content": "two"}]],
        "completions": ["good 3", [{"role": "assistant", "content": "bad 4"}]],
        "completion_ids": [[1], [2, 3]],
        "answer": ["3", "4"],
        "some_other_column": [0, 0],
        "trainer_state": None,
    }
    scores = reward(**arguments)
    assert len(scores) == 2
    assert all(score is None or isinstance(score, float) for score in scores)


def test_dotted_name_of_a_module_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "own_rewards_for_test.py").write_text(
        "def short(completions, **kwargs):\n    return [0.0]\n\nlimit = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert get_reward("own_rewards_for_test.short")(completions=["x"]) == [0.0]
    with pytest.raises(ValueError, match="is of type int"):
        get_reward("own_rewards_for_test.limit")


@pytest.mark.parametrize(
    "name", ["exact_macth", "no_such_module.reward", "trl_alpharl.rewards.text.nothing", "", ".reward"]
)
def test_unknown_name_is_one_line_with_the_list(name):
    with pytest.raises(ValueError) as error:
        get_reward(name)
    message = str(error.value)
    assert "\n" not in message
    assert all(known in message for known in REWARD_FUNCS)
    assert ("did you mean 'exact_match'?" in message) == (name == "exact_macth")


def test_an_error_inside_the_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards_for_test.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        get_reward("broken_rewards_for_test.reward")


def test_importing_the_table_imports_nothing_heavy():
    code = (
        "import sys, trl_alpharl.rewards.runner, trl_alpharl.rewards.combine, trl_alpharl.rewards.model; "
        "print([name for name in ('torch', 'transformers', 'trl', 'vaderSentiment') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
