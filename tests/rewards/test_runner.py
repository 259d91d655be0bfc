import asyncio
import functools
import inspect
import math
import threading

import numpy as np
import pytest
import torch

from trl_alpharl.rewards.runner import RewardRunner, RewardTable


def run(functions, completions=("a", "bb"), columns=None, extras=None, **kwargs):
    completions = list(completions)
    runner = RewardRunner(functions, **kwargs)
    ids = [[1] * len(text) for text in completions]
    return runner(["p"] * len(completions), completions, ids, columns or {}, extras)


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def async_length(completions, **kwargs):
    await asyncio.sleep(0)
    return length(completions)


class Longer:
    def __init__(self, by):
        self.by = by

    def __call__(self, prompts, completions, completion_ids, **columns):
        return [len(ids) + self.by for ids in completion_ids]


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return [None] * len(completions)


def scaled(completions, scale, **kwargs):
    return [scale * len(text) for text in completions]


def test_sync_async_objects_and_partials_in_one_table():
    table = run([length, async_length, Longer(10), AsyncJudge(), functools.partial(scaled, scale=3)])
    assert isinstance(table, RewardTable)
    assert table.names == ["length", "async_length", "Longer", "AsyncJudge", "scaled"]
    assert [row[:3] + row[4:] for row in table.values] == [[1, 1, 11, 3], [2, 2, 12, 6]]
    assert all(math.isnan(row[3]) for row in table.values)
    assert table.given == [[True, True, True, False, True]] * 2


def test_none_is_no_opinion_and_nan_is_a_number_given():
    table = run([lambda completions: [None, float("nan")], lambda completions: [math.inf, 1]])
    assert table.given == [[False, True], [True, True]]
    assert math.isnan(table.values[0][0]) and math.isnan(table.values[1][0])
    assert table.values[0][1] == math.inf


def test_async_functions_wait_together():
    arrived = []

    def judge(name):
        async def wait_for_the_other(completions, **kwargs):
            arrived.append(name)
            while len(arrived) < 2:  # one after the other, this would never end
                await asyncio.sleep(0.001)
            return [0.0] * len(completions)

        return wait_for_the_other

    functions = [judge("first"), judge("second")]
    thread = threading.Thread(target=lambda: run(functions), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_works_inside_a_running_event_loop():
    async def notebook_cell():
        return run([async_length, length])

    assert asyncio.run(notebook_cell()).values == [[1, 1], [2, 2]]


def test_an_async_client_survives_from_call_to_call():
    # HTTP clients keep the loop of their first request; a loop a call would be closed at the second one.
    loops = []

    async def judge(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    run([judge])
    run([judge])
    assert loops[0] is loops[1] and not loops[0].is_closed()


def test_columns_and_extras_reach_functions():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    def only_answer(answer):
        return [float(value) for value in answer]

    columns = {"answer": [3, 4], "level": ["easy", "hard"], "prompt": ["x", "y"]}
    table = run([everything, only_answer], columns=columns, extras={"trainer_state": "state", "log_metric": print})
    assert [row[1] for row in table.values] == [3, 4]
    assert set(seen) == {"prompts", "completions", "completion_ids", "answer", "level", "trainer_state", "log_metric"}
    assert seen["level"] == ["easy", "hard"] and seen["completion_ids"] == [[1], [1, 1]]


@pytest.mark.parametrize(
    "signature", ["completions, answer", "completions, answer, **kwargs", "completions, *, answer"]
)
def test_missing_column_names_function_column_and_what_is_there(signature):
    namespace = {}
    exec(f"def grade({signature}):\n    return [0.0] * len(completions)", namespace)
    with pytest.raises(ValueError, match=r"'grade' needs a column 'answer'.*level, prompts, completions"):
        run([namespace["grade"]], columns={"level": [1, 2]})


def test_default_arguments_need_no_column():
    def grade(completions, answer=None, scale=2.0):
        return [scale] * len(completions)

    assert run([grade]).values == [[2.0], [2.0]]


@pytest.mark.parametrize(
    "output",
    [
        [1, 2.5],
        (1, 2.5),
        np.array([1, 2.5]),
        torch.tensor([1, 2.5]),
        torch.tensor([1, 2.5], dtype=torch.bfloat16, requires_grad=True),
        [np.float32(1), np.float64(2.5)],
        [torch.tensor(1), torch.tensor(2.5)],
        [True, 2.5],
    ],
)
def test_numbers_of_every_kind(output):
    table = run([lambda completions: output])
    assert table.values == [[1.0], [2.5]]
    assert all(type(value) is float for row in table.values for value in row)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0], "'broken' returned 1 rewards for 2 completions"),
        ([1.0] * 3, "'broken' returned 3 rewards for 2 completions"),
        (1.0, "'broken' returned float; a list of 2"),
        (None, "'broken' returned NoneType; a list of 2"),
        ({0: 1.0, 1: 2.0}, "'broken' returned dict; a list of 2"),
        ([1.0, "2"], "'broken' returned str in row 1"),
        ([[1.0], 2.0], "'broken' returned list in row 0"),
        ([1.0, 1j], "'broken' returned complex in row 1"),
        ([1.0, torch.ones(2)], "'broken' returned Tensor in row 1"),
        (torch.ones(2, 1), "'broken' returned list in row 0"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_wrong_results_are_one_line(output, message, is_async):
    def broken(completions):
        return output

    async def awaited(completions):
        return output

    awaited.__name__ = "broken"
    with pytest.raises(ValueError) as error:
        run([length, awaited if is_async else broken])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_exceptions_keep_their_type_and_name_the_function():
    def sync_fault(completions):
        raise KeyError("missing")

    async def async_fault(completions):
        raise KeyError("missing")

    for fault in (sync_fault, async_fault):
        with pytest.raises(KeyError) as error:
            run([length, fault])
        assert error.value.__notes__ == [f"in reward function {fault.__name__!r}"]


def test_a_fault_leaves_no_coroutine_open():
    waiting = async_length(["a", "bb"])

    def fault(completions):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run([lambda completions: waiting, fault])
    assert inspect.getcoroutinestate(waiting) == inspect.CORO_CLOSED


def test_names_are_unique():
    assert RewardRunner([length, Longer(1), length, Longer(2), length]).names == [
        "length", "Longer", "length_2", "Longer_2", "length_3",
    ]  # fmt: skip
    assert RewardRunner([length, length], names=["a", "b"]).names == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"reward_funcs": [length, 3]}, r"reward_funcs\[1\] is 3"),
        ({"reward_funcs": [Longer]}, r"reward_funcs\[0\] is the class Longer"),
        ({"reward_funcs": [length], "weights": [1, 2]}, "reward_weights has 2 entries for 1 reward"),
        ({"reward_funcs": [length], "names": []}, "names has 0 entries for 1 reward"),
    ],
)
def test_wrong_construction_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(**arguments)


def test_weights_default_to_one():
    assert RewardRunner([length, length]).weights == [1.0, 1.0]
    assert RewardRunner([length, length], weights=[2, 0.5]).weights == [2.0, 0.5]
