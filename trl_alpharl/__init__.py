"""PPO for RLHF with a learned critic, as a plugin for TRL.

Public names resolve on first use, so that `import trl_alpharl` and the command line's help stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rewards.combine import Combined
    from .rewards.model import RewardModel
    from .rewards.scaled import RobustScaled
    from .trainers.arpo_config import ARPOConfig
    from .trainers.arpo_trainer import ARPOTrainer
    from .trainers.ppo_config import PPOConfig
    from .trainers.ppo_trainer import PPOTrainer

__version__ = "0.1.0"

_HOMES = {
    "ARPOConfig": ".trainers.arpo_config",
    "ARPOTrainer": ".trainers.arpo_trainer",
    "Combined": ".rewards.combine",
    "PPOConfig": ".trainers.ppo_config",
    "PPOTrainer": ".trainers.ppo_trainer",
    "RewardModel": ".rewards.model",
    "RobustScaled": ".rewards.scaled",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "ARPOConfig",
    "ARPOTrainer",
    "Combined",
    "PPOConfig",
    "PPOTrainer",
    "RewardModel",
    "RobustScaled",
    "__version__",
]
