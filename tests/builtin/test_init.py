"""The room's public names."""

import pytest

import trl_alpharl.builtin as builtin
from trl_alpharl.builtin.pretrain import load_builtin


def test_public_names_resolve_and_others_do_not():
    assert builtin.load_builtin is load_builtin
    assert all(callable(getattr(builtin, name)) for name in builtin.__all__)
    with pytest.raises(AttributeError, match="load_buildin"):
        _ = builtin.load_buildin
