"""PPO for RLHF with a learned critic, as a plugin for TRL.

Public names resolve on first use, so that `import trl_alpharl` and the command line's help stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lowrank.callback import LowRankGradientCallback, LowRankLogger
    from .lowrank.config import LowRankConfig
    from .lowrank.mixin import LowRankMixin
    from .lowrank.optimizer import LowRankAdamW
    from .lowrank.param_groups import low_rank_optimizer
    from .lowrank.rank1 import Rank1Monitor
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
    "LowRankAdamW": ".lowrank.optimizer",
    "LowRankConfig": ".lowrank.config",
    "LowRankGradientCallback": ".lowrank.callback",
    "LowRankLogger": ".lowrank.callback",
    "LowRankMixin": ".lowrank.mixin",
    "PPOConfig": ".trainers.ppo_config",
    "PPOTrainer": ".trainers.ppo_trainer",
    "Rank1Monitor": ".lowrank.rank1",
    "RewardModel": ".rewards.model",
    "RobustScaled": ".rewards.scaled",
    "low_rank_optimizer": ".lowrank.param_groups",
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
    "LowRankAdamW",
    "LowRankConfig",
    "LowRankGradientCallback",
    "LowRankLogger",
    "LowRankMixin",
    "PPOConfig",
    "PPOTrainer",
    "Rank1Monitor",
    "RewardModel",
    "RobustScaled",
    "__version__",
    "low_rank_optimizer",
]
