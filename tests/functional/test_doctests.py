"""Every public function of functional/ and of shapes.py shows a runnable example, and every example is right."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

from trl_alpharl import functional

MODULES = [f"trl_alpharl.functional.{module.name}" for module in pkgutil.iter_modules(functional.__path__)]
MODULES.append("trl_alpharl.shapes")


def public_functions(module):
    for name, thing in vars(module).items():
        is_ours = getattr(thing, "__module__", None) == module.__name__
        is_record = inspect.isclass(thing) and issubclass(thing, tuple)  # a NamedTuple is shown where it is returned
        if (
            is_ours
            and not name.startswith("_")
            and (inspect.isfunction(thing) or inspect.isclass(thing))
            and not is_record
        ):
            yield name, thing


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    without = [n for n, thing in public_functions(module) if ">>> " not in (thing.__doc__ or "")]
    assert without == []
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0
