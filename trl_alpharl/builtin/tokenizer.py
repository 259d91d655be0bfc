"""The embedded tokenizer: a token is a word with its leading space, so that decoding restores the text."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_WORD_OR_MARK = Regex(r" ?\w+|\s|[^\w\s]")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows every word of `texts`; any other word becomes `<unk>`. It adds no token to a text.

    The ids do not depend on the order of the texts: `<pad>` 0, `<eos>` 1, `<unk>` 2, then the words in sorted order.
    """
    splitter = pre_tokenizers.Split(_WORD_OR_MARK, behavior="isolated")
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {word: index for index, word in enumerate([PAD, EOS, UNK, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
