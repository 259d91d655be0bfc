"""Pre-training of the embedded model on the embedded corpus: seconds on a CPU, then from the cache."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from trl_alpharl.builtin import cache
from trl_alpharl.builtin.corpus import stories
from trl_alpharl.builtin.model import build_model
from trl_alpharl.builtin.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)

_STORIES = 6144
_CORPUS_SEED = 0
_ROWS = 32
_PEAK_LEARNING_RATE = 6e-3
_IGNORED = -100  # the label that transformers' loss skips


def load_builtin(
    seed: int = 0, cache_dir: str | Path | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The pre-trained embedded model (fp32, on the CPU, in eval mode) and its tokenizer (padding on the left).

    `seed` draws the initial weights and the order of the stories. The result is kept in `cache_dir`, by default
    `trl-alpharl` under `$XDG_CACHE_HOME` or `~/.cache`; a damaged entry is made again, and where nothing can be written the
    model is returned without being kept. torch's global generator is left as it was.
    """
    root = Path(cache_dir) if cache_dir is not None else cache.default_root()
    folder = root / f"builtin-seed{seed}-{cache.source_hash()}"
    if not cache.is_intact(folder):
        model, tokenizer = pretrain(seed)
        try:
            cache.store(folder, model, tokenizer)
        except OSError as error:
            logger.warning("The embedded model is not cached: %s", error)
            return model, tokenizer
    return LlamaForCausalLM.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)


def pretrain(seed: int, story_count: int = _STORIES) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Builds tokenizer and model and trains for one pass over `story_count` stories, next-token loss, AdamW."""
    texts = stories(story_count, _CORPUS_SEED)
    tokenizer = build_tokenizer(texts)
    model = build_model(tokenizer, seed)
    random.Random(seed).shuffle(texts)
    batches = [texts[start : start + _ROWS] for start in range(0, len(texts), _ROWS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_LEARNING_RATE, total_steps=len(batches), pct_start=0.1)
    model.train()
    for batch in (progress := tqdm(batches, desc="pre-training the embedded model", leave=False)):
        loss = model(**encode(batch, tokenizer)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.2f}")
    model.zero_grad()
    return model.eval(), tokenizer


def encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Stories as a training batch: `input_ids`, `attention_mask`, `labels`, (rows, longest) long each.

    An `<eos>` ends every story. Padding is on the right; its labels are ignored by the loss.
    """
    ended = [text + tokenizer.eos_token for text in texts]
    batch = tokenizer(ended, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, _IGNORED)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
