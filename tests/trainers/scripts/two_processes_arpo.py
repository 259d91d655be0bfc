"""Two processes train with every mechanism of ARPO; test_arpo_distributed.py starts it and reads what it writes.

Usage: two_processes_arpo.py FOLDER, where FOLDER holds `model/` (a tiny model with its tokenizer) and `prompts.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_alpharl import ARPOConfig, ARPOTrainer


def value(completions, **kwargs):
    """The mean word number of a completion, between 0 and 1."""
    words = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(numbers) / (63 * max(1, len(numbers))) for numbers in words]


def make(folder: Path, name: str, **changes) -> ARPOTrainer:
    """A trainer with everything on."""
    args = ARPOConfig(
        preset="ppo",
        output_dir=str(folder / name),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_ppo_epochs=2,
        total_episodes=32,
        response_length=6,
        learning_rate=5e-3,
        logging_steps=1,
        num_sample_generations=0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        seed=7,
        reward_scaling="robust",
        popart=True,
        entropy_control="pi",
        advantage_norm="ema",
        explained_variance_gate=True,
        kl_stop=1e-3,
        reuse_surge=1.05,
        positive_nll_coef=0.1,
        logit_noise=0.3,
        norm_noise=0.01,
        replay_ratio=0.5,
        curriculum="success",
        screening=2,
        **changes,
    )
    return ARPOTrainer(
        args=args,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_dict({"prompt": json.loads((folder / "prompts.json").read_text())}),
        reward_funcs=value,
    )


def write(folder: Path, name: str, run: ARPOTrainer) -> None:
    """Weights, controllers and stores of a run on this process."""
    rank = run.args.process_index
    save_file(
        {k: t.contiguous().clone() for k, t in run.model.state_dict().items()}, folder / f"{name}-{rank}.safetensors"
    )
    for part, store in run._stores().items():
        save_file(store.tensors(), folder / f"{name}-{part}-{rank}.safetensors")
    controllers = {key: part.state_dict() for key, part in run._controllers().items() if key != "metrics"}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(controllers))


def main(folder: Path) -> None:
    """A straight run, and the same resumed in the middle of its third rollout."""
    straight = make(folder, "straight", save_strategy="steps", save_steps=1)
    straight.train()
    write(folder, "straight", straight)
    resumed = make(folder, "resumed", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / "straight/checkpoint-5"))
    write(folder, "resumed", resumed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
