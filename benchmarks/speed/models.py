"""Models, tokenizer and LoRA of a `Work`, for both sides: transformers and peft only."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from .work import SHAPES, Work, sizes


def load_tokenizer(work: Work) -> Any:
    """The folder's tokenizer, or one of words w2, w3, ... for a shape; padded on the left, with a pad token that is
    neither the end token nor sampled: TRL 1.12 tells padding by its id."""
    if work.model in SHAPES:
        tokenizer = _word_tokenizer(SHAPES[work.model]["vocab_size"])
    else:
        tokenizer = AutoTokenizer.from_pretrained(work.model)
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def load_policy(work: Work, pad_token_id: int) -> nn.Module:
    """The causal language model."""
    model = _load(work, AutoModelForCausalLM)
    model.generation_config.pad_token_id = pad_token_id
    return model


def load_value_model(work: Work) -> nn.Module:
    """A sequence classifier with one label, from the same folder or shape."""
    return _load(work, AutoModelForSequenceClassification, num_labels=1)


def lora_config(work: Work, by_layers: bool) -> LoraConfig:
    """Both sides' LoRA. `by_layers`: restricted to the top layers by peft itself; ours has a field for that."""
    layers = None
    if by_layers and work.lora_top_layers is not None:
        total = sizes(work.model)["num_hidden_layers"]
        layers = list(range(total - work.lora_top_layers, total))
    return LoraConfig(
        r=work.lora_rank,
        lora_alpha=2 * work.lora_rank,
        target_modules=list(work.lora_modules),
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )


def _load(work: Work, auto: Any, **kwargs: Any) -> nn.Module:
    dtype = torch.bfloat16 if work.dtype == "nf4" else getattr(torch, work.dtype)
    if work.model in SHAPES:
        config = LlamaConfig(**SHAPES[work.model], pad_token_id=0, eos_token_id=1, bos_token_id=None, **kwargs)
        torch.manual_seed(0)
        with torch.device(work.device):
            model = auto.from_config(config, dtype=dtype)
        return _in_nf4(model) if work.dtype == "nf4" else model
    if work.dtype == "nf4":
        from transformers import BitsAndBytesConfig

        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        kwargs["device_map"] = {"": work.device}
    return auto.from_pretrained(work.model, dtype=dtype, **kwargs)


def _in_nf4(model: nn.Module) -> nn.Module:
    """The same model with its linear layers in 4 bits, heads excepted: what `from_pretrained` makes of a folder."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Linear and child_name not in ("lm_head", "score"):
                weight = child.weight.data
                with torch.device("meta"):
                    packed = Linear4bit(child.in_features, child.out_features, bias=False, compute_dtype=weight.dtype)
                packed.weight = Params4bit(weight, requires_grad=False, quant_type="nf4").to(weight.device)
                setattr(module, child_name, packed)
    model.is_loaded_in_4bit = True  # peft chooses its layers by it
    return model


def _word_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
