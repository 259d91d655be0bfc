from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from trl_alpharl import __version__
from trl_alpharl.reporting.summary import Summary, peak_rss_bytes, summarize, versions, write_summary

MEASURED = {
    "score_before": 0.5,
    "score_after": 1.5,
    "score_before_se": 0.1,
    "score_after_se": 0.2,
    "kl": 2.0,
    "entropy": 30.0,
    "seconds": 60.0,
    "response_tokens_per_s": 700.0,
    "rows": [{"prompt": "é", "before": "a", "after": "b", "score_before": None, "score_after": math.inf}],
    "output_dir": "out",
    "log_history": [{"loss": 1.0}],
}


def test_the_file_holds_the_promised_keys(tmp_path):
    write_summary(tmp_path / "summary.json", summarize(MEASURED))
    read = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert read.keys() == Summary.__annotations__.keys()
    assert {key: read[key] for key in MEASURED.keys() & read.keys() - {"rows"}} == {
        key: MEASURED[key] for key in MEASURED.keys() & read.keys() - {"rows"}
    }
    assert read["versions"].keys() == {"python", "torch", "transformers", "trl", "peft", "trl_alpharl"}


def test_numbers_that_are_not_finite_become_null(tmp_path):
    summary = summarize({**MEASURED, "kl": math.nan})
    write_summary(tmp_path / "summary.json", summary)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert read["kl"] is None
    assert read["rows"] == [{"prompt": "é", "before": "a", "after": "b", "score_before": None, "score_after": None}]


def test_a_key_that_was_not_measured_is_named():
    with pytest.raises(KeyError, match="entropy"):
        summarize({key: value for key, value in MEASURED.items() if key != "entropy"})


def test_peak_memory_is_what_the_kernel_says():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    ballast = bytearray(64 << 20)
    high_water = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    del ballast
    assert peak_rss_bytes() == pytest.approx(high_water, rel=0.05)


def test_versions_are_those_of_the_running_libraries():
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["trl_alpharl"] == __version__
