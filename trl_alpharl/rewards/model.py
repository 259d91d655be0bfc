"""A sequence classifier as a reward: it reads the text of a conversation with its own tokenizer and template."""

from __future__ import annotations

import warnings
from typing import Any

from .text import completion_text, content_text


class RewardModel:
    """A reward function that scores prompt + completion with a one-label sequence classifier; usable in TRL's GRPO too.

    The model reads text, never the policy's token ids, so its vocabulary may differ and merges across the border of
    prompt and completion are its own. Text prompts are joined with their completion and tokenized with the special
    tokens that the tokenizer adds; chat prompts go through the tokenizer's chat template. Rows are padded on the right
    and masked by position, so a text may hold the padding token. A text longer than the model reads loses its
    beginning, with one warning. A text without any token gives None.

    `model`: any `AutoModelForSequenceClassification`, PEFT-wrapped or 4-bit too; it is put into eval mode.
    `tokenizer`: the model's own. `batch_size`: texts a forward pass.
    Raises `ValueError` for more than one label, an encoder-decoder, PEFT prompt learning, a tokenizer that is not the
    model's, and for chat prompts when the tokenizer has no chat template.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 16) -> None:
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("the reward model uses PEFT prompt learning, which is not supported; LoRA is.")
        # LoRA layers live inside the base model; the wrapper only hides its attributes.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        config = self.model.config
        self.__name__ = _last_part(config._name_or_path or type(self.model).__name__)
        if config.num_labels != 1:
            raise ValueError(f"reward model {self.__name__!r} has {config.num_labels} labels; num_labels=1 is needed.")
        if config.is_encoder_decoder:
            raise ValueError(f"reward model {self.__name__!r} is an encoder-decoder, which is not supported.")
        limits = (getattr(config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length)
        self.max_tokens = min(limit for limit in limits if limit is not None)
        self.shares_vocabulary = False  # a trainer says so when the policy's token ids mean the same here
        self._warned = False

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]] | None = None,
        prompt_ids: list[list[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """One score a completion, fp32. `prompt_ids`: for prompts that came as token ids, whose role markers and other
        special tokens a text without them would lose."""
        if prompt_ids is not None and completion_ids is not None and self.shares_vocabulary:
            ids = [self._anew(asked + answered) for asked, answered in zip(prompt_ids, completion_ids, strict=True)]
        else:
            ids = [self._token_ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        known = self.model.get_input_embeddings().weight.shape[0]
        highest = max((token for row in ids for token in row), default=0)
        if highest >= known:  # on a GPU the lookup would end the process instead
            raise ValueError(
                f"reward model {self.__name__!r} embeds {known} tokens but its tokenizer gave id {highest}; "
                "pass the tokenizer that belongs to the model."
            )
        self.model.eval()
        scores: list[float | None] = [None] * len(ids)
        by_length = sorted((at for at, row in enumerate(ids) if row), key=lambda at: len(ids[at]))
        for start in range(0, len(by_length), self.batch_size):
            batch = by_length[start : start + self.batch_size]
            for at, score in zip(batch, self._score([ids[at] for at in batch])):
                scores[at] = score
        return scores

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            text, add_special_tokens = prompt + completion_text(completion), True
        else:
            text = self._chat_text(prompt, completion)
            # A template writes its own special tokens, all but the [CLS] and [SEP] of an encoder's tokenizer.
            cls = self.tokenizer.cls_token
            add_special_tokens = cls is not None and not text.startswith(cls)
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        starts = {self.tokenizer.bos_token_id, self.tokenizer.cls_token_id} - {None}
        if len(ids) > 1 and ids[0] == ids[1] and ids[0] in starts:
            ids = ids[1:]  # the text began with the token that the tokenizer adds
        return self._fitted(ids)

    def _anew(self, ids: list[int]) -> list[int]:
        """The whole row's text, special tokens included, tokenized anew: tokens may merge across the border."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._fitted(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _fitted(self, ids: list[int]) -> list[int]:
        if len(ids) <= self.max_tokens:
            return ids
        starts = {self.tokenizer.bos_token_id, self.tokenizer.cls_token_id} - {None}
        return self._truncate(ids, keep_first=ids[0] in starts)

    def _chat_text(self, prompt: list[dict[str, Any]], completion: Any) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"reward model {self.__name__!r}: prompts are chat messages but its tokenizer has no chat template; "
                "set tokenizer.chat_template or use text prompts."
            )
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        messages = [{**message, "content": content_text(message.get("content"))} for message in [*prompt, *answer]]
        return self.tokenizer.apply_chat_template(messages, tokenize=False)

    def _truncate(self, ids: list[int], keep_first: bool) -> list[int]:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"reward model {self.__name__!r} reads at most {self.max_tokens} tokens; a text of {len(ids)} lost its "
                "beginning (said once).",
                stacklevel=2,
            )
        head = ids[: int(keep_first)]
        return head + ids[len(ids) - self.max_tokens + len(head) :]

    def _score(self, rows: list[list[int]]) -> list[float]:
        import torch

        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        # The mask alone says what is padding; any id that the model embeds will fill it.
        input_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        attention_mask = (torch.arange(width) < lengths[:, None]).long()
        device = self.model.get_input_embeddings().weight.device
        inputs = {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}
        head = getattr(self.model, "score", None)
        with torch.no_grad():
            if head is None:  # an encoder pools at a fixed position
                return self.model(**inputs).logits[:, 0].float().tolist()
            # A decoder's own forward looks for the last token by the padding id: wrong when a text may hold it.
            trunk = getattr(self.model, self.model.base_model_prefix)
            hidden = trunk(**inputs, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(rows), device=hidden.device), (lengths - 1).to(hidden.device)]
            return head(last.to(next(head.parameters())))[:, 0].float().tolist()


def load_reward_model(path: str, batch_size: int = 16, revision: str = "main", **kwargs: Any) -> RewardModel:
    """A `RewardModel` from a folder or hub id of a model or a PEFT adapter.

    `kwargs` (dtype, device_map, quantization_config) go to transformers.
    Raises `ValueError` when the checkpoint has no one-label head: a random head would score noise.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, info = AutoModelForSequenceClassification.from_pretrained(
        path,
        revision=revision,
        num_labels=1,
        ignore_mismatched_sizes=True,  # reported below instead
        output_loading_info=True,
        trust_remote_code=False,
        **kwargs,
    )
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    what = f"without fitting {', '.join(sorted(lacking))}" if lacking else ""
    # After an adapter's weights transformers reports those alone, and a random head of the base goes unsaid.
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.task_type != "SEQ_CLS":
            what = f"an adapter with task_type {adapter.task_type}"
    if what:
        raise ValueError(f"reward model {path!r} is {what}; a trained classifier with one label (SEQ_CLS) is needed.")
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    reward = RewardModel(model, tokenizer, batch_size)
    reward.__name__ = _last_part(path)  # an adapter's model calls itself after its base
    return reward


def _last_part(path: str) -> str:
    return path.rstrip("/").split("/")[-1]


__all__ = ["RewardModel", "load_reward_model"]
