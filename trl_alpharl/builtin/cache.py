"""The folder that keeps the embedded model: written in one move, checked by content before it is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Whatever changes the weights is in these files, so that their text is the version.
_SOURCES = ("corpus.py", "tokenizer.py", "model.py", "pretrain.py")
_CHECKSUMS = "checksums.json"


def default_root() -> Path:
    """`trl-alpharl` in the user's cache folder (the XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl-alpharl"


def source_hash() -> str:
    """12 hex digits over the code that makes the model; they change when it changes."""
    room = Path(__file__).parent
    return hashlib.sha256(b"\0".join((room / name).read_bytes() for name in _SOURCES)).hexdigest()[:12]


def is_intact(folder: Path) -> bool:
    """Whether `folder` holds every file that `store` wrote, byte for byte.

    transformers fills a weight that the file lacks with random numbers and a log line; so nothing is loaded unchecked.
    """
    try:
        expected = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        return bool(expected) and expected == _checksums(folder)
    except (OSError, ValueError):
        return False


def store(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Saves model and tokenizer as `folder`, replacing a damaged one. Raises `OSError` where it cannot write.

    Another process may store the same model meanwhile: whoever comes second keeps what the first one wrote.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "model"
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / _CHECKSUMS).write_text(json.dumps(_checksums(fresh)), encoding="utf-8")
        if not is_intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(fresh, folder)
        except OSError:
            if not is_intact(folder):
                raise


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != _CHECKSUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
