from __future__ import annotations

import pytest

from trl_alpharl.reporting.atomic import write_atomically


def test_the_file_appears_whole_in_a_new_folder(tmp_path):
    path = tmp_path / "a/b/file.txt"
    seen = []

    def write(file):
        file.write_text("half")
        seen.append(path.exists())
        file.write_text("whole")

    write_atomically(path, write)
    assert seen == [False]
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write(file):
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
