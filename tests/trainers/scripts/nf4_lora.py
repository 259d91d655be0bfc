"""Three updates of LoRA adapters over a 4-bit model, under `accelerate launch`; test_distributed.py reads the result.

Usage: nf4_lora.py FOLDER, where FOLDER holds `model/` (a tiny model with its tokenizer) and `prompts.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from trl_alpharl import PPOConfig, PPOTrainer


def score(prompts, completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


def main(folder: Path) -> None:
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    run = PPOTrainer(
        PPOConfig(
            output_dir=str(folder / "nf4"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_ppo_epochs=1,
            total_episodes=12,
            response_length=4,
            learning_rate=1e-2,
            critic="adapter",
            save_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
        ),
        AutoTokenizer.from_pretrained(folder / "model"),
        AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=quantized),
        train_dataset=Dataset.from_dict({"prompt": json.loads((folder / "prompts.json").read_text())}),
        reward_funcs=score,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train()
    changed = [name for name, tensor in run.model.state_dict().items() if not torch.equal(tensor, before[name])]
    packed = [name for name, tensor in before.items() if tensor.dtype == torch.uint8]
    result = {"changed": changed, "packed": packed, "steps": run.state.global_step}
    (folder / "nf4.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
