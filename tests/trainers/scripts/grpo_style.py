"""A training script in the style of TRL's GRPO: a model by name, reward functions, a `prompt` column.

test_swap_in.py runs it with its import line changed. DATA and MODEL come from there.
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

seen = []


def near_the_answer(prompts, completions, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    seen.extend(zip(prompts, texts, answer))
    return [float(a in text.split()) for a, text in zip(answer, texts)]


trainer = GRPOTrainer(
    model=MODEL,  # noqa: F821
    reward_funcs=[near_the_answer, "trl_alpharl.rewards.exact_match.exact_match"],
    args=GRPOConfig(
        output_dir=f"{MODEL}-trained",  # noqa: F821
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=2,
        logging_steps=1,
        reward_weights=[1.0, 0.5],
        use_cpu=True,
        bf16=False,
        report_to="none",
    ),
    train_dataset=load_dataset("json", data_files=DATA, split="train"),  # noqa: F821
)
trainer.train()
trainer.save_model()
