"""Prompts: which rows a rollout takes, and their token ids. Text, chat turns and ready-made ids are all prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._trl import apply_chat_template, is_conversational


def seeded_generator(*parts: int) -> torch.Generator:
    """A generator that depends on `parts` alone, so that a resumed run draws what the straight run drew."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 0x9E3779B9) & 0x7FFF_FFFF_FFFF_FFFF
    return torch.Generator().manual_seed(seed)


def prompt_rows(num_rows: int, batch_size: int, rollout: int, seed: int) -> list[int]:
    """The dataset rows of one rollout, over all processes.

    Prompts are an endless stream of shuffled passes over the dataset; rollout k takes its k-th slice of `batch_size`.
    """
    rows: list[int] = []
    position = rollout * batch_size
    while len(rows) < batch_size:
        epoch, offset = divmod(position + len(rows), num_rows)
        order = torch.randperm(num_rows, generator=seeded_generator(seed, epoch))
        rows += order[offset : offset + batch_size - len(rows)].tolist()
    return rows


class PromptTokenizer:
    """Token ids of dataset rows.

    A row holds `prompt` (text, or chat turns that go through the chat template) or `input_ids` (with an optional
    `attention_mask`). With `data_collator` (a TRL 1.12 script's) the rows' tensors go through it and its mask decides
    what counts. Padding is dropped here by that mask; later code pads as it needs.

    Raises ValueError for a missing column, an empty prompt, an id past `num_embeddings`, or a collator that returns no
    mask.
    """

    def __init__(self, tokenizer: Any, data_collator: Callable | None = None) -> None:
        self.tokenizer = tokenizer
        self.data_collator = data_collator
        self.num_embeddings: int | None = None  # rows of the model's embedding, once a model is known

    def check(self, example: dict[str, Any], name: str) -> None:
        """Raise one line if a dataset's rows cannot be read."""
        if "prompt" not in example and "input_ids" not in example:
            raise ValueError(f"{name} needs a `prompt` or an `input_ids` column; it has {sorted(example)}.")
        chat = "input_ids" not in example and is_conversational({"prompt": example["prompt"]})
        if chat and getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{name}.prompt holds chat turns, but the tokenizer has no chat template.")

    def __call__(self, examples: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Token ids of each row's prompt, without padding."""
        if self.data_collator is not None and all("input_ids" in example for example in examples):
            rows = self._collated(examples)
        else:
            rows = [self._tokenize(example) for example in examples]
        for example, ids in zip(examples, rows):
            if not ids:
                raise ValueError(
                    f"a prompt has no tokens: {str(example.get('prompt', example.get('input_ids')))[:80]!r}."
                )
            if self.num_embeddings is not None and max(ids) >= self.num_embeddings:
                raise ValueError(
                    f"a prompt holds token id {max(ids)}, but the model has {self.num_embeddings} embeddings; "
                    "tokenize with the model's own tokenizer."
                )
        return rows

    def _collated(self, examples: Sequence[dict[str, Any]]) -> list[list[int]]:
        keep = ("input_ids", "attention_mask")
        batch = self.data_collator([{key: example[key] for key in keep if key in example} for example in examples])
        if "attention_mask" not in batch:
            raise ValueError("data_collator must return `attention_mask`; padding is told by it, never by token id.")
        return [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]

    def _tokenize(self, example: dict[str, Any]) -> list[int]:
        if "input_ids" in example:
            ids = torch.as_tensor(example["input_ids"])
            mask = example.get("attention_mask")
            return (ids if mask is None else ids[torch.as_tensor(mask).bool()]).tolist()
        prompt = example["prompt"]
        if is_conversational({"prompt": prompt}):
            text = apply_chat_template({"prompt": prompt}, self.tokenizer)["prompt"]
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not isinstance(prompt, str):
            raise ValueError(f"`prompt` must be text or a list of chat turns, found {type(prompt).__name__}.")
        return self.tokenizer(prompt)["input_ids"]


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids (B, P) padded on the left with `pad_id`, and their mask (B, P)."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[index, width - len(row) :] = True
    return ids.to(device), mask.to(device)
