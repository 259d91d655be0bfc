"""`summary.json`: what a run came to, for people and for scripts that compare runs."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import sys
from importlib.metadata import version
from typing import Any, TypedDict

from .. import __version__
from .atomic import write_atomically


class Row(TypedDict):
    """One prompt's completion before and after training; a score is None where every reward gave None."""

    prompt: str
    before: str
    after: str
    score_before: float | None
    score_after: float | None


class Summary(TypedDict):
    """The file's keys. Scores are means over the held-out prompts, `_se` their standard errors, in reward units."""

    score_before: float
    score_after: float
    score_before_se: float
    score_after_se: float
    kl: float  # nats a completion, of the last log
    entropy: float  # nats a completion, of the last log
    seconds: float  # of training, without loading and without the two held-out scores
    response_tokens_per_s: float
    peak_rss_bytes: int
    versions: dict[str, str]
    rows: list[Row]


def summarize(measured: dict[str, Any]) -> Summary:
    """The summary's keys out of what a run measured, with this process's peak memory and the versions added.

    Raises KeyError naming a key that the run did not measure.
    """
    known = {"peak_rss_bytes": peak_rss_bytes(), "versions": versions()}
    return Summary(**{key: known[key] if key in known else measured[key] for key in Summary.__annotations__})


def write_summary(path: str | os.PathLike[str], summary: Summary) -> None:
    """Write the summary as JSON, atomically. A number that is not finite becomes null: NaN is not JSON."""
    text = json.dumps(_finite(summary), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_rss_bytes() -> int:
    """Most memory that this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def versions() -> dict[str, str]:
    """Versions of Python, of the libraries that decide a run's numbers, and of this package."""
    libraries = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
    return {"python": platform.python_version(), **libraries, "trl_alpharl": __version__}
