"""How a knob is written."""

from __future__ import annotations

import dataclasses
from typing import Any


def knob(default: Any, help: str) -> Any:
    """A dataclass field with its help text."""
    return dataclasses.field(default=default, metadata={"help": help})
