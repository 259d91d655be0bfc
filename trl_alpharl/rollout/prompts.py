"""Prompts: which rows a rollout takes, and their token ids. Text, chat turns and ready-made ids are all prompts."""

from __future__ import annotations

import json
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

    A row holds `prompt` (text, or chat turns that go through the chat template, with the row's `tools` and
    `chat_template_kwargs` where it has them) or `input_ids` (with an optional `attention_mask`). With `data_collator`
    (a TRL 1.12 script's) the rows' tensors go through it and its mask decides what counts. Padding is dropped here by
    that mask; later code pads as it needs.

    Raises ValueError for a missing column, an empty prompt, an id past `num_embeddings`, or a collator that returns no
    mask.
    """

    def __init__(
        self,
        tokenizer: Any,
        data_collator: Callable | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,  # of every row; a row's own come first
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.data_collator = data_collator
        self.num_embeddings: int | None = None  # rows of the model's embedding, once a model is known

    def check(self, example: dict[str, Any], name: str) -> None:
        """Raise one line if a dataset's rows cannot be read."""
        if "prompt" not in example and "input_ids" not in example:
            chat = [column for column in ("messages", "conversations") if column in example]
            hint = f" Rename {chat[0]!r} to 'prompt', without the answers to be trained." if chat else ""
            raise ValueError(f"{name} needs a `prompt` or an `input_ids` column; it has {sorted(example)}.{hint}")
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
            if min(ids) < 0:
                raise ValueError(f"a prompt holds token id {min(ids)}; mark what does not count in `attention_mask`.")
        return rows

    def _collated(self, examples: Sequence[dict[str, Any]]) -> list[list[int]]:
        keep = ("input_ids", "attention_mask")
        batch = self.data_collator([{key: example[key] for key in keep if key in example} for example in examples])
        if "attention_mask" not in batch:
            raise ValueError("data_collator must return `attention_mask`; padding is told by it, never by token id.")
        return [_unmasked(ids, mask) for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]

    def _tokenize(self, example: dict[str, Any]) -> list[int]:
        if "input_ids" in example:
            return _unmasked(example["input_ids"], example.get("attention_mask"))
        prompt = example["prompt"]
        if is_conversational({"prompt": prompt}):
            arguments = {**self.chat_template_kwargs, **_given(example.get("chat_template_kwargs"))}
            text = apply_chat_template({"prompt": prompt}, self.tokenizer, _tools(example), **arguments)["prompt"]
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not isinstance(prompt, str):
            raise ValueError(f"`prompt` must be text or a list of chat turns, found {type(prompt).__name__}.")
        return self._text_ids(prompt)

    def _text_ids(self, text: str) -> list[int]:
        """Token ids of a text that goes on: with one first token where both text and tokenizer bring it, as after a
        chat template that a script applied, and without an end that the tokenizer adds."""
        ids = self.tokenizer(text)["input_ids"]
        if (
            len(ids) > 1
            and ids[0] == ids[1] == self.tokenizer.bos_token_id
            and text.startswith(self.tokenizer.bos_token)
        ):
            ids = ids[1:]
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            own = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids[-len(own) - 1 : -1] == own:
                ids = ids[:-1]
        return ids


def _unmasked(ids: Any, mask: Any) -> list[int]:
    ids = torch.as_tensor(ids)
    if ids.dim() != 1:
        raise ValueError(f"`input_ids` of a row must be one list of token ids, found the shape {tuple(ids.shape)}.")
    if mask is None:
        return ids.tolist()
    mask = torch.as_tensor(mask)
    if mask.shape != ids.shape:
        raise ValueError(f"`attention_mask` of a row has {mask.numel()} entries for {len(ids)} input_ids.")
    return ids[mask.bool()].tolist()


def _given(arguments: dict[str, Any] | None) -> dict[str, Any]:
    """A row's template arguments without those of other rows, which a table fills with None."""
    return {name: value for name, value in (arguments or {}).items() if value is not None}


def _tools(example: dict[str, Any]) -> Any:
    """A row's tools: a list, or such a list as JSON, as TRL reads it."""
    tools = example.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools)
    except ValueError:
        raise ValueError(
            f"`tools` beside a chat prompt must be a list of tools or its JSON, found {tools!r}."
        ) from None


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids (B, P) padded on the left with `pad_id`, and their mask (B, P)."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[index, width - len(row) :] = True
    return ids.to(device), mask.to(device)
