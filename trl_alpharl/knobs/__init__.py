"""Our configuration fields as plain dataclasses.

Standard library only: `trl-alpharl --help` and the recipe loader read these fields without importing torch.
`trainers.ppo_config.PPOConfig` is these knobs on top of TRL's `_BaseConfig`.
"""

from __future__ import annotations

from .arpo import ARPOKnobs
from .lowrank import (
    LOWRANK_PREFIX,
    WRITTEN_IN,
    LowRankKnobs,
    LowRankSwitch,
    PrefixedLowRankKnobs,
    Storage,
    SubspaceMethod,
)
from .ppo import COMPUTED, OTHER_NAMES, PPOKnobs
from .script import ScriptKnobs

__all__ = [
    "COMPUTED",
    "LOWRANK_PREFIX",
    "OTHER_NAMES",
    "WRITTEN_IN",
    "ARPOKnobs",
    "LowRankKnobs",
    "LowRankSwitch",
    "PPOKnobs",
    "PrefixedLowRankKnobs",
    "ScriptKnobs",
    "Storage",
    "SubspaceMethod",
]
