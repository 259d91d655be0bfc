"""The tiny set-up of the case list: a two-layer Llama with random weights, a word-level tokenizer, 64 short prompts."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
from collections.abc import Callable
from typing import Any, ClassVar

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


class FakeVLLM:
    """`VLLMGeneration` in small: a copy of the model, loaded by name and filled by name, that draws from the process's
    own generators, as an engine in one process does."""

    engines: ClassVar[list] = []

    def __init__(
        self,
        model,
        accelerator,
        processing_class,
        mode="colocate",
        structured_outputs_regex=None,
        server_base_url=None,
        server_host="0.0.0.0",
        server_port=8000,
        server_timeout=240.0,
        group_port=51216,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        max_model_length=None,
        max_num_seqs=None,
        enable_sleep_mode=False,
        model_impl="auto",
        trust_remote_code=False,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_completion_length=16,
        logprobs=0,
        generation_kwargs=None,
    ):
        from transformers import AutoModelForCausalLM, set_seed

        self.settings = {name: value for name, value in locals().items() if name != "self"}
        self.model, self.temperature, self.length = model, temperature, max_completion_length
        self.stops = set(generation_kwargs["stop_token_ids"])
        self.context = max_model_length or 10**9
        self.own = AutoModelForCausalLM.from_pretrained(model.name_or_path).requires_grad_(False).eval()
        for weight in self.own.parameters():
            weight.zero_()  # what was never sent is not there
        self.calls: list[str] = []
        set_seed(0)
        FakeVLLM.engines.append(self)

    def sync_weights(self):
        self.calls.append("sync")
        sent = dict(self.model.named_parameters())
        own = dict(self.own.named_parameters())
        assert sent.keys() == own.keys()
        for name, weight in self.model.named_parameters():
            own[name].copy_(weight.data)

    def generate(self, prompts, images, num_generations, profiler=None):
        assert images is None and num_generations == 1
        self.calls.append("generate")
        answers = [self._answer(list(prompt)) for prompt in prompts]
        tokens, logps = ([answer[part] for answer in answers] for part in (0, 1))
        return prompts, tokens, logps, [[[token] for token in row] for row in tokens]

    def _answer(self, prompt):
        tokens, logps = [], []
        while len(tokens) < min(self.length, self.context - len(prompt)):
            scores = self.own(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float() / self.temperature
            token = int(torch.multinomial(scores.softmax(-1), 1))
            tokens.append(token)
            logps.append([float(scores.log_softmax(-1)[token])])
            if token in self.stops:
                break
        return tokens, logps


@pytest.fixture
def fake_vllm(monkeypatch) -> type:
    """`FakeVLLM` in the place of TRL's class; its `engines` are those that were started."""
    for door in ("rollout.vllm", "trainers.engine"):
        monkeypatch.setattr(f"trl_alpharl.{door}.vllm_generation", lambda: FakeVLLM)
    monkeypatch.setattr(FakeVLLM, "engines", [])
    return FakeVLLM


@pytest.fixture
def named_model(model, tmp_path) -> Any:
    """The tiny policy as it comes from a folder, whose name it knows."""
    from transformers import LlamaForCausalLM

    model.save_pretrained(tmp_path / "policy")
    return LlamaForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)


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
