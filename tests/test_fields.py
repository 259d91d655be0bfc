from __future__ import annotations

from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trl_alpharl.fields import FIELDS, Field, ValueProblem, read_value


def read(text: str, kind):
    node = yaml.compose(f"x: {text}", Loader=yaml.SafeLoader).value[0][1]
    return read_value(node, Field("x", kind, None, "", "ppo"))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("no", str, "no"),
        ("no", bool, False),
        ("Off", bool, False),
        ("yes", bool, True),
        ("no", Literal["no", "steps"], "no"),
        ("1e-3", float, 0.001),
        ("1E-3", float | None, 0.001),
        ("3", float, 3.0),
        ("-.5", float, -0.5),
        ("2.", float, 2.0),
        (".inf", float, float("inf")),
        ("1e5", int, 100_000),
        ("10_000", int, 10_000),
        ("010", int, 10),
        ("-1", int, -1),
        ("1:30", str, "1:30"),
        ("2024-01-01", str, "2024-01-01"),
        ("123", str, "123"),
        ("0x10", str, "0x10"),
        ("null", int | None, None),
        ("none", str | None, None),
        ("", str | None, None),
        ("'none'", str | None, "none"),
        ("none", str | list[str], "none"),
        ("''", str, ""),
        ("[a, none, 'b, c']", list[str], ["a", "none", "b, c"]),
        ("a", list[str], ["a"]),
        ("[1, 2e0, .5]", list[float], [1.0, 2.0, 0.5]),
        ("a", str | list[str], "a"),
        ("[a]", str | list[str], ["a"]),
        ("true", bool | str | None, True),
        ("runs/7", bool | str | None, "runs/7"),
        ("ds.json", dict | str | None, "ds.json"),
        (
            "{a: 1e-3, b: off, c: 'off', d: {e: [1, null, x]}}",
            dict,
            {"a": 0.001, "b": False, "c": "off", "d": {"e": [1, None, "x"]}},
        ),
    ],
)
def test_reads_what_a_reader_thinks(text, kind, value):
    found = read(text, kind)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("3.7", int, "x: found '3.7', expected a whole number"),
        ("3.0", int, "x: found '3.0', expected a whole number"),
        ("1e-3", int, "x: found '1e-3', expected a whole number"),
        ("1e999", int, "x: found '1e999', expected a whole number"),
        ("true", int | None, "x: found 'true', expected a whole number or none"),
        ("1:30", int, "x: found '1:30', expected a whole number"),
        ("٣", int, "x: found '٣', expected a whole number"),
        ("true", float, "x: found 'true', expected a number"),
        ("nan", float, "x: found 'nan', expected a number"),
        ("[1, 2]", float, "x: found a list, expected a number"),
        ("1", bool, "x: found '1', expected true or false"),
        ("none", bool, "x: found 'none', expected true or false"),
        ("bogus", Literal["k1", "k2"], "x: found 'bogus', expected one of k1, k2"),
        ("K1", Literal["k1", "k2"], "x: found 'K1', expected one of k1, k2"),
        ("bogus", Literal["eos"] | None, "x: found 'bogus', expected eos or none"),
        ("", str, "x: found nothing, expected text"),
        ("null", str, "x: found 'null', expected text"),
        ("{a: 1}", str, "x: found a mapping, expected text"),
        ("{a: 1}", list[str] | None, "x: found a mapping, expected a list of texts or none"),
        ("[1, b]", list[float], "x: found 'b', expected a number"),
        ("[[a]]", list[str], "x: found a list, expected text"),
        ("[a, ]", dict, "x: found a list, expected a mapping such as {key: value}"),
        ("{a: {b: 1, b: 2}}", dict, "x: b: given twice, first in line 1"),
    ],
)
def test_refuses_the_rest_in_one_line(text, kind, message):
    with pytest.raises(ValueProblem) as problem:
        read(text, kind)
    assert str(problem.value) == message


@given(st.floats(allow_nan=False))
def test_every_float_that_python_writes_comes_back(number):
    assert read(repr(number), float) == number


@given(st.integers())
def test_every_whole_number_comes_back_exactly(number):
    assert read(str(number), int) == number


def test_every_field_says_what_it_is_and_belongs_to_one_object():
    for field in FIELDS.values():
        assert field.help[0] == field.help[0].strip() and field.help.endswith("."), field.name
        assert field.section in ("ppo", "arpo", "model", "script"), field.name


def test_our_own_knob_wins_over_the_training_argument_of_the_same_name():
    assert FIELDS["learning_rate"].default == 3e-6
