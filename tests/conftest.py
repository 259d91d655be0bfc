"""The tiny set-up of the case list: a two-layer Llama with random weights, a word-level tokenizer, 64 short prompts."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)  # a red run can be repeated
settings.load_profile("ci" if os.environ.get("CI") else "any machine")

VOCAB = 64
PAD, EOS = 0, 1


@pytest.fixture(scope="session")
def tokenizer():
    """Words w2..w63, `<pad>` = 0, `<eos>` = 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def llama_config(**changes: Any):
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="session")
def _models():
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    policy = LlamaForCausalLM(llama_config())
    torch.manual_seed(1)
    classifier = LlamaForSequenceClassification(llama_config(num_labels=1))
    return policy, classifier


@pytest.fixture
def model(_models):
    """A fresh copy of the tiny policy."""
    return copy.deepcopy(_models[0])


@pytest.fixture
def classifier(_models):
    """A fresh copy of the tiny sequence classifier with one label."""
    return copy.deepcopy(_models[1])


@pytest.fixture(scope="session")
def dataset():
    """64 prompts of 2-5 words, as text."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 6, (64,), generator=generator).tolist()
    rows = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in rows]})


@pytest.fixture(scope="session")
def lora():
    """A small LoRA on the attention's inputs."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def count_word(prompts: list, completions: list, **kwargs: Any) -> list[float]:
    """How often a completion says w5, w6 or w7."""
    return [float(sum(word in ("w5", "w6", "w7") for word in text.split())) for text in completions]


@pytest.fixture
def config(tmp_path) -> Callable:
    """A factory of the tiny set-up's PPOConfig: a rollout of 8, micro-batches of 2, 2 epochs, 6 tokens, fp32."""
    from trl_alpharl import PPOConfig

    def make(**changes: Any):
        values = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_ppo_epochs": 2,
            "total_episodes": 16,
            "response_length": 6,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "num_sample_generations": 0,
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "report_to": "none",
            "seed": 7,
        }
        return PPOConfig(**{**values, **changes})

    return make


@pytest.fixture
def trainer(config, model, tokenizer, dataset) -> Callable:
    """A factory of the tiny set-up's PPOTrainer. Keywords of PPOConfig go into the config, others to the trainer."""
    from dataclasses import fields

    from trl_alpharl import PPOConfig, PPOTrainer

    names = {field.name for field in fields(PPOConfig)}

    def make(**changes: Any):
        knobs = {name: value for name, value in changes.items() if name in names}
        rest = {name: value for name, value in changes.items() if name not in names}
        values = {
            "model": model,
            "processing_class": tokenizer,
            "train_dataset": dataset,
            "args": config(**knobs),
        }
        if "reward_model" not in rest:
            values["reward_funcs"] = count_word
        return PPOTrainer(**{**values, **rest})

    return make
