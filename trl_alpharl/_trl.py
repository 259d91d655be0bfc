"""The only door to TRL. A name that a release moved away fails here, at import, with the tested range."""

from __future__ import annotations

import importlib
from typing import Any

import trl

TESTED = "1.12.0 to 1.16.0"


def _take(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"TRL {trl.__version__} has no `{module}.{name}`, which trl-alpharl needs; tested with TRL {TESTED}."
        ) from error


BaseTrainer = _take("trl.trainer.base_trainer", "_BaseTrainer")
BaseConfig = _take("trl.trainer.base_config", "_BaseConfig")
ModelConfig = _take("trl", "ModelConfig")
TrlParser = _take("trl", "TrlParser")
get_peft_config = _take("trl", "get_peft_config")
get_quantization_config = _take("trl", "get_quantization_config")
is_conversational = _take("trl", "is_conversational")
apply_chat_template = _take("trl", "apply_chat_template")


def vllm_generation() -> Any:
    """TRL's `VLLMGeneration`, taken when a run asks for it: its module imports vLLM. ImportError without that."""
    if not _take("trl.import_utils", "is_vllm_available")():
        raise ImportError(
            "use_vllm is set, but vLLM is not installed: pip install 'trl[vllm]', or set use_vllm to false."
        )
    return _take("trl.generation.vllm_generation", "VLLMGeneration")
