"""The work that both sides do, as plain data: it travels to their processes as JSON. Standard library only."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TEMPERATURE = 0.7
PHASES = ("rollout", "score", "update", "rest")
REWARD_MODULUS = 7  # the reward of both sides: the last token's id modulo this
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Llama configurations whose weights are drawn at random, in memory.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    },
    "7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}

# Fields of our PPOConfig that an ablation changes, one switch at a time, each to the value that it does not have by
# default. This is the only list of them.
SWITCHES: dict[str, dict[str, Any]] = {
    "LoRA products not fused": {"fuse_lora": False},
    "RMSNorm not fused": {"fuse_norms": False},
    "adapters not merged for rollouts": {"merge_lora_in_rollouts": False},
    "layers compiled": {"compile_layers": True},
    "rows of a chunk by a budget of 2 GiB": {"memory_budget_gib": 2.0},
    "frozen layers not cached": {"cache_frozen_layers": False},
    "ended rows stay in the batch": {"drop_finished_rows": False},
}
NEEDS_FROZEN_LAYERS = ("cache_frozen_layers",)  # without effect where every layer has an adapter
NEEDS_EARLY_ENDS = ("drop_finished_rows",)  # without effect where every completion has the same length


@dataclass(frozen=True)
class Variant:
    """A comparison. `critic`: ours; TRL's is always a model of its own. `top_half`: both sides' LoRA on the upper half
    of the layers only. `ragged`: prompts of several lengths, and a token that ends most answers early."""

    critic: str = "shared"
    top_half: bool = False
    ragged: bool = False


VARIANTS = {
    "shared": Variant(),
    "adapter": Variant(critic="adapter"),
    "top-half": Variant(top_half=True),
    "ragged": Variant(ragged=True),
}


@dataclass(frozen=True)
class Work:
    """What one process runs: `updates` rollouts of `len(prompts)` completions, the first of them as a warm-up."""

    model: str  # a folder, or a name in SHAPES
    prompts: list[list[int]]  # token ids; every rollout answers all of them
    response_tokens: int
    dtype: str = "bfloat16"  # of the weights: bfloat16, float32 or nf4
    device: str = "cpu"
    stop_token_id: int | None = None  # None: every completion has exactly `response_tokens`
    updates: int = 3
    ppo_epochs: int = 4
    micro_batch: int = 8  # rows
    gradient_checkpointing: bool = False
    lora_rank: int = 16
    lora_modules: tuple[str, ...] = LORA_MODULES
    lora_top_layers: int | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # further fields of our PPOConfig

    def write(self, path: Path) -> None:
        """As JSON, for another process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Work:
        """What `write` wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "lora_modules": tuple(values["lora_modules"])})

    def summary(self) -> dict[str, Any]:
        """The fields for a report: prompts by their lengths alone."""
        lengths = [len(prompt) for prompt in self.prompts]
        return {**asdict(self), "model": Path(self.model).name, "prompts": lengths}


def sizes(model: str) -> dict[str, int]:
    """A model's configuration: a shape's, or that of the folder."""
    return SHAPES[model] if model in SHAPES else json.loads((Path(model) / "config.json").read_text())


def random_prompts(model: str, rows: int, tokens: int, ragged: bool, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids: `tokens` long each, or `ragged` from a quarter to seven quarters of that."""
    draw = random.Random(seed)
    vocabulary = sizes(model)["vocab_size"]
    first = 100 if vocabulary > 1000 else 2  # past the special tokens
    shortest = max(1, tokens // 4)
    lengths = [draw.randint(shortest, 2 * tokens - shortest) if ragged else tokens for _ in range(rows)]
    return [[draw.randrange(first, vocabulary) for _ in range(length)] for length in lengths]


def count_tokens(rows: list[list[int]], stop_token_id: int | None) -> int:
    """Response tokens of sampled rows: up to the first stop token, itself included, else all."""
    return sum(row.index(stop_token_id) + 1 if stop_token_id in row else len(row) for row in rows)


def ending_token(rows: list[list[int]]) -> int:
    """The token id that, as a stop token, would bring the mean length of these rows closest to half of theirs."""
    half = sum(map(len, rows)) / 2
    return min(sorted({token for row in rows for token in row}), key=lambda id: abs(count_tokens(rows, id) - half))


def common_settings(work: Work) -> dict[str, Any]:
    """Fields of TRL 1.12's `PPOConfig`, and of ours, that are the same on both sides."""
    rows = len(work.prompts)
    return {
        "use_cpu": work.device == "cpu",
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": rows // work.micro_batch,
        "gradient_checkpointing": work.gradient_checkpointing,
        "response_length": work.response_tokens,
        "temperature": TEMPERATURE,
        "stop_token": None,
        "stop_token_id": work.stop_token_id,
        "num_ppo_epochs": work.ppo_epochs,
        "total_episodes": rows * work.updates,
        "local_rollout_forward_batch_size": rows,
        "learning_rate": 1e-5,
        "seed": work.seed,
        "num_sample_generations": 0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
