"""The oracle throughout: transformers' own classifier on one unpadded row, with no padding id to look for."""

import warnings

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from trl_alpharl.rewards import get_reward
from trl_alpharl.rewards.model import RewardModel, load_reward_model

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz :!"
PROMPTS = ["the cat", "x", "a much longer prompt than the others", "dog"]
COMPLETIONS = [" sat", "", " ends", " barks at night all night long"]


def letter_tokenizer(**kwargs):
    """One token a letter, but "ab" is merged; adds <s> in front, as Llama's does; pad is eos."""
    vocab = {"<s>": 0, "</s>": 1, **{letter: at + 2 for at, letter in enumerate(LETTERS)}}
    vocab["ab"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **kwargs})


def bert_tokenizer():
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "cat", "sat", "dog", "x"]
    vocab = {word: at for at, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def llama(**kwargs):
    torch.manual_seed(0)
    config = {"vocab_size": 40, "num_labels": 1, "pad_token_id": 1, "eos_token_id": 1, "bos_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(**{**SIZES, **config, **kwargs}))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=128, num_labels=1, pad_token_id=1)
    return GPT2ForSequenceClassification(config)


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=1, **SIZES))


@torch.no_grad()
def one_by_one(model, rows):
    """Score of each row of token ids by the model's own forward: batch 1, no padding id."""
    model.eval()
    pad_token_id, model.config.pad_token_id = model.config.pad_token_id, None
    scores = [model(torch.tensor([row])).logits.item() for row in rows]
    model.config.pad_token_id = pad_token_id
    return scores


def ids_of(text):
    """The letter tokenizer's ids by hand, without the leading <s>; "ab" is its one merge."""
    ids = []
    while text:
        token = next(known for known in ("</s>", "ab", text[0]) if text.startswith(known))
        ids.append({"</s>": 1, "ab": 2 + len(LETTERS)}.get(token, LETTERS.find(token) + 2))
        text = text[len(token) :]
    return ids


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_decoder_scores_do_not_depend_on_batch_or_padding(make, batch_size, padding_side):
    model = make()
    reward = RewardModel(model, letter_tokenizer(padding_side=padding_side), batch_size=batch_size)
    expected = one_by_one(model, [[0, *ids_of(p + c)] for p, c in zip(PROMPTS, COMPLETIONS)])
    assert len(set(expected)) == 4
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=None, level=[1, 2, 3, 4])
    assert scores == pytest.approx(expected, abs=1e-5)
    assert all(type(score) is float for score in scores)


def test_case_20_the_whole_text_is_tokenized_again():
    model = llama()
    reward = RewardModel(model, letter_tokenizer())
    merged, in_two_parts = one_by_one(model, [[0, *ids_of("xab")], [0, *ids_of("xa"), *ids_of("b")]])
    assert merged != pytest.approx(in_two_parts, abs=1e-4)
    ids_of_the_policy = [ids_of("b")]
    assert reward(prompts=["xa"], completions=["b"], completion_ids=ids_of_the_policy) == pytest.approx(
        [merged], abs=1e-5
    )


def test_case_10_a_text_that_ends_in_the_padding_token_is_read_at_its_end():
    model = llama()
    reward = RewardModel(model, letter_tokenizer())
    expected, before_eos = one_by_one(model, [[0, *ids_of("hi"), 1], [0, *ids_of("hi")]])
    assert expected != pytest.approx(before_eos, abs=1e-4)
    scores = reward(prompts=["hi", "longer than"], completions=["</s>", " the first"])
    assert scores[0] == pytest.approx(expected, abs=1e-5)


def test_case_22_chat_goes_through_the_reward_tokenizers_own_template_and_vocabulary():
    model = llama()
    reward = RewardModel(model, letter_tokenizer(chat_template=TEMPLATE))
    prompt = [{"role": "user", "content": "hi"}]
    answers = [
        "yo",
        [{"role": "assistant", "content": "yo"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "yo"}]}],
    ]
    (expected,) = one_by_one(model, [[0, *ids_of("user:hi</s>assistant:yo</s>")]])
    ids_beyond_the_reward_vocabulary = [[90_000]] * 3
    scores = reward(prompts=[prompt] * 3, completions=answers, completion_ids=ids_beyond_the_reward_vocabulary)
    assert scores == pytest.approx([expected] * 3, abs=1e-5)


def test_text_that_already_holds_the_first_token_gets_no_second_one():
    model = llama()
    reward = RewardModel(model, letter_tokenizer())
    with_it, without = reward(prompts=["<s>the", "the"], completions=[" cat", " cat"])
    (expected,) = one_by_one(model, [[0, *ids_of("the cat")]])
    assert [with_it, without] == pytest.approx([expected] * 2, abs=1e-5)


def test_encoders_get_their_special_tokens_for_text_and_for_chat():
    model, tokenizer = bert(), bert_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    reward = RewardModel(model, tokenizer)
    rows = [[1, 4, 5, 6, 2], [1, 8, 2]]
    expected = one_by_one(model, rows)
    assert reward(prompts=["the cat", "x"], completions=[" sat", ""]) == pytest.approx(expected, abs=1e-5)
    chat = [[{"role": "user", "content": "the cat"}], [{"role": "user", "content": "x"}]]
    assert reward(prompts=chat, completions=["sat", ""]) == pytest.approx(expected, abs=1e-5)


def test_chat_without_a_template_is_one_line():
    reward = RewardModel(llama(), letter_tokenizer())
    with pytest.raises(ValueError, match="has no chat template") as error:
        reward(prompts=[[{"role": "user", "content": "hi"}]], completions=["yo"])
    assert "\n" not in str(error.value)


def test_long_texts_keep_their_end_and_first_token_and_warn_once():
    model = llama(max_position_embeddings=6)
    reward = RewardModel(model, letter_tokenizer())
    (expected,) = one_by_one(model, [[0, *ids_of("vwxyz")]])
    with pytest.warns(UserWarning, match="at most 6 tokens; a text of 26 lost its beginning"):
        scores = reward(prompts=["abcdefghijklm", "uvw"], completions=["nopqrstuvwxyz", "xyz"])
    assert scores == pytest.approx([expected] * 2, abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward(prompts=["abcdefghijklm"], completions=["nopqrstuvwxyz"])


def test_the_tokenizers_own_limit_counts_too():
    model, tokenizer = bert(), bert_tokenizer()
    tokenizer.model_max_length = 4
    with pytest.warns(UserWarning, match="at most 4 tokens"):
        (score,) = RewardModel(model, tokenizer)(prompts=["x x x the"], completions=[" cat"])
    assert score == pytest.approx(one_by_one(model, [[1, 4, 5, 2]])[0], abs=1e-5)


def test_a_text_without_tokens_has_no_score():
    tokenizer = letter_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    first, second = RewardModel(llama(), tokenizer)(prompts=["", "a"], completions=["", ""])
    assert first is None and isinstance(second, float)


def test_dropout_is_off_and_no_graph_is_kept():
    model = llama(attention_dropout=0.5)
    model.train()
    reward = RewardModel(model, letter_tokenizer())
    model.train()  # someone switched it back
    assert reward(PROMPTS, COMPLETIONS) == reward(PROMPTS, COMPLETIONS)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_peft_wrapped_model():
    model = get_peft_model(
        llama(), LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=2, init_lora_weights=False)
    )
    reward = RewardModel(model, letter_tokenizer())
    expected = one_by_one(model.get_base_model(), [[0, *ids_of(p + c)] for p, c in zip(PROMPTS, COMPLETIONS)])
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-5)
    with model.disable_adapter():
        assert reward(PROMPTS, COMPLETIONS) != pytest.approx(expected, abs=1e-5)


def test_trunk_in_bf16_with_a_head_in_fp32():
    model = llama()
    expected = one_by_one(model, [[0, *ids_of("the cat")]])
    model.model.to(torch.bfloat16)
    assert RewardModel(model, letter_tokenizer())(["the"], [" cat"]) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: llama(num_labels=2), "has 2 labels; num_labels=1 is needed"),
        (
            lambda: BartForSequenceClassification(
                BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, num_labels=1)
            ),
            "encoder-decoder",
        ),
        (
            lambda: get_peft_model(llama(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)),
            "prompt learning",
        ),
    ],
)
def test_unfit_models_are_one_line(model, message):
    with pytest.raises(ValueError, match=message) as error:
        RewardModel(model(), letter_tokenizer())
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_another_model_is_one_line():
    reward = RewardModel(llama(vocab_size=8), letter_tokenizer())
    with pytest.raises(ValueError, match="embeds 8 tokens but its tokenizer gave id"):
        reward(["the"], [" cat"])


def test_saved_and_loaded_by_folder(tmp_path):
    folder = tmp_path / "tiny-reward"
    model, tokenizer = llama(), letter_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = get_reward(str(folder))
    assert loaded.__name__ == "tiny-reward"
    assert loaded(PROMPTS, COMPLETIONS) == pytest.approx(RewardModel(model, tokenizer)(PROMPTS, COMPLETIONS), abs=1e-6)


def test_checkpoints_without_a_trained_head_are_refused(tmp_path):
    letter_tokenizer().save_pretrained(tmp_path)
    causal = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_labels=1, **SIZES))
    causal.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"without fitting score\.weight; a trained classifier with one label"):
        load_reward_model(str(tmp_path))
    adapter = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
    )
    adapter.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="an adapter with task_type CAUSAL_LM; a trained classifier"):
        load_reward_model(str(tmp_path / "adapter"))
    llama(num_labels=2).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"without fitting score\.weight; a trained classifier with one label"):
        load_reward_model(str(tmp_path / "two"))


def test_an_adapter_folder_loads_with_its_head(tmp_path):
    tokenizer = letter_tokenizer()
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES)).save_pretrained(tmp_path)
    base = LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    adapter = get_peft_model(
        base, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=2, init_lora_weights=False)
    )
    adapter.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    loaded = load_reward_model(str(tmp_path / "adapter"))
    assert loaded.__name__ == "adapter"
    assert loaded(PROMPTS, COMPLETIONS) == pytest.approx(
        RewardModel(adapter, tokenizer)(PROMPTS, COMPLETIONS), abs=1e-6
    )


def test_nf4_model(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    llama(hidden_size=64).save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    reward = load_reward_model(str(tmp_path), quantization_config=config)
    expected = one_by_one(reward.model, [[0, *ids_of(p + c)] for p, c in zip(PROMPTS, COMPLETIONS)])
    assert type(reward.model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-3)
