"""TRL's own GRPO trainer calls our rewards, unchanged and with nothing adapted."""

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from trl_alpharl.rewards.combine import Combined
from trl_alpharl.rewards.exact_match import exact_match
from trl_alpharl.rewards.model import RewardModel
from trl_alpharl.rewards.scaled import RobustScaled


def tiny_tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{str(digit): 3 + digit for digit in range(10)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


async def even_length(completions, completion_ids, trainer_state, **kwargs):
    return [None if trainer_state is None else float(len(ids) % 2 == 0) for ids in completion_ids]


def number_of_tokens(completion_ids, **kwargs):
    return [1e4 * len(ids) + ids[0] for ids in completion_ids]


@pytest.mark.trl_compat
def test_one_grpo_step(tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=13, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes)
    classifier = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=13, num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes)
    )
    reward_model = RewardModel(classifier, tokenizer)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        processing_class=tokenizer,
        reward_funcs=[
            exact_match,
            reward_model,
            even_length,
            Combined([exact_match, even_length], weights=[2.0, 1.0]),
            RobustScaled(number_of_tokens),
        ],
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1 2 3", "4 5"] * 4, "answer": ["4", "6"] * 4}),
    )
    trainer.train()
    logged = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    match, model_score, even, combined = (
        logged[f"rewards/{name}/mean"]
        for name in ("exact_match", "LlamaForSequenceClassification", "even_length", "Combined")
    )
    assert 0 <= match <= 1 and 0 <= even <= 1 and model_score != 0
    assert combined == pytest.approx(2 * match + even)
    assert -3 <= logged["rewards/scaled_number_of_tokens/mean"] <= 3
