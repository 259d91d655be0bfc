"""A training script as users wrote it for TRL 1.12. test_swap_in.py runs it with its PPO import line changed."""

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    TrainerCallback,
)
from trl import ModelConfig, ScriptArguments, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer


class CountSteps(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        CountSteps.steps += 1


def main():
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    peft_config = get_peft_config(model_args)
    ref_policy = None
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)

    data = load_dataset("json", data_files=script_args.dataset_name, split="train")
    data = data.map(
        lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]},
        remove_columns=data.column_names,
        num_proc=training_args.dataset_num_proc,
    )
    held_out = data.select(range(len(data) - 8, len(data)))
    data = data.select(range(len(data) - 8))

    optimizer = torch.optim.AdamW(
        [*(p for p in policy.parameters() if p.requires_grad), *value_model.parameters()],
        lr=training_args.learning_rate,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=data,
        eval_dataset=held_out,
        data_collator=DataCollatorWithPadding(tokenizer),
        optimizers=(None, None) if peft_config else (optimizer, scheduler),
        callbacks=[CountSteps()],
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name="prompts")
    trainer.generate_completions()
    return trainer, CountSteps.steps


if __name__ == "__main__":
    trainer, steps = main()
