"""Recipes to trained models, with a tiny model in place of the named one."""

from __future__ import annotations

import json

import pytest

from trl_alpharl import pipeline
from trl_alpharl.recipe import load_recipe, shipped_recipes

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
)


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    """The tiny model and its tokenizer as a local folder, with a chat template."""
    path = tmp_path / "tiny"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    saved = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**saved, "chat_template": CHAT_TEMPLATE}))
    return str(path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i % 60 + 2} w3", "number": i}) + "\n" for i in range(40)))
    return str(path)


def small(folder: str, tmp_path, *flags: str) -> list[str]:
    return [
        *("--model_name_or_path", folder, "--output_dir", str(tmp_path / "out"), "--max_steps", "1"),
        *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--response_length", "4"),
        *("--eval_rows", "4", "--use_cpu", "--disable_tqdm", *flags),
    ]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_runs(name, folder, tmp_path):
    flags = small(folder, tmp_path)
    if "tiny" in name:
        flags += ["--dataset_name", "builtin"]
    measured = pipeline.run(pipeline.build(load_recipe(name, flags)))
    assert {"score_before", "score_after", "kl", "entropy", "seconds", "response_tokens_per_s"} <= set(measured)
    assert any((tmp_path / "out").glob("*.safetensors"))


def test_nf4_and_lora_by_flags(folder, prompts, tmp_path):
    lora = ["--use_peft", "--load_in_4bit", "--lora_target_modules", "q_proj"]
    flags = small(folder, tmp_path, "--dataset_name", prompts, *lora)
    prepared = pipeline.build(load_recipe("quickstart/ppo_tiny", flags))
    kinds = {type(module).__name__ for module in prepared.trainer.model.modules()}
    assert "Linear4bit" in kinds
    prepared.trainer.train()
    assert prepared.trainer.state.global_step == 1


class TestPrompts:
    def test_rows_are_held_out(self, folder, prompts, tmp_path):
        script = pipeline.ScriptKnobs(dataset_name=prompts, eval_rows=10)
        train, held_out = pipeline.load_prompts(script, seed=0)
        assert (len(train), len(held_out)) == (30, 10)
        assert not set(train["number"]) & set(held_out["number"])

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"dataset_name": None}, "dataset_name: missing"),
            ({"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
            ({"dataset_train_split": "practice"}, "dataset_train_split is 'practice'"),
            ({"dataset_test_split": "exam"}, "dataset_test_split is 'exam'"),
            ({"eval_rows": 40}, "eval_rows is 40"),
            ({"dataset_name": "texts.jsonl"}, "texts.jsonl needs a `prompt` column; it has text"),
        ],
    )
    def test_mistakes_are_one_line(self, prompts, changes, words, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "texts.jsonl").write_text('{"text": "w5"}\n')
        script = pipeline.ScriptKnobs(**{"dataset_name": prompts, **changes})
        with pytest.raises(ValueError, match=words):
            pipeline.load_prompts(script, seed=0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reward_funcs", "vader_sentimnt"], "vader_sentiment"),
        (["--load_in_4bit"], "load_in_4bit"),
        (["--kl_coef", "-1"], "kl_coef"),
    ],
)
def test_mistakes_are_told_before_training(flags, words, tmp_path):
    recipe = load_recipe("quickstart/ppo_tiny", ["--output_dir", str(tmp_path), *flags])
    with pytest.raises(ValueError, match=words):
        pipeline.build(recipe)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reward_funcs", "no/such-model"], "no/such-model"),
        (["--reward_weights", "1", "2"], "reward_weights has 2 entries for 1"),
        (["--critic", "adapter"], "critic='adapter' needs a LoRA policy"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint: there is no folder nowhere"),
        (["--resume_from_checkpoint", "."], "manifest.json is missing"),
        (["--resume_from_checkpoint"], "resume_from_checkpoint is true, but .*run holds no checkpoint"),
    ],
)
def test_the_model_loads_last(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "load_model", None)
    recipe = load_recipe("quickstart/ppo_tiny", ["--output_dir", str(tmp_path / "run"), *flags])
    with pytest.raises(ValueError, match=words):
        pipeline.build(recipe)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"save_only_model": True}, "was saved with save_only_model"),
        (
            {"save_only_model": False, "run": {"critic": "adapter"}},
            "was saved with critic='adapter'; this run has 'shar",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_before_the_model_loads(manifest, words, tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    monkeypatch.setattr(pipeline, "load_model", None)
    flags = ["--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", str(tmp_path)]
    with pytest.raises(ValueError, match=words):
        pipeline.build(load_recipe("quickstart/ppo_tiny", flags))


def test_a_saved_adapter_learns_on(folder, prompts, lora, tmp_path):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = tmp_path / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(adapter)
    flags = small(str(adapter), tmp_path, "--dataset_name", prompts, "--reward_funcs", "exact_match")
    with pytest.raises(ValueError, match=r"use_peft: .*adapter is a saved adapter"):
        pipeline.build(load_recipe("quickstart/ppo_tiny", [*flags, "--use_peft"]))
    trainer = pipeline.build(load_recipe("quickstart/ppo_tiny", flags)).trainer
    learning = [name for name, parameter in trainer.policy_model.named_parameters() if parameter.requires_grad]
    assert learning and all("lora_" in name for name in learning)
    assert trainer.processing_class.chat_template == CHAT_TEMPLATE  # the base model's tokenizer


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    """Real RL on the embedded model, one seed, a shorter run: the score rises by more than 3 standard errors."""
    flags = ["--output_dir", str(tmp_path / "run"), "--total_episodes", "768", "--disable_tqdm", "--use_cpu"]
    measured = pipeline.run(pipeline.build(load_recipe("quickstart/ppo_tiny", flags)))
    error = (measured["score_before_se"] ** 2 + measured["score_after_se"] ** 2) ** 0.5
    assert measured["score_after"] - measured["score_before"] >= 3 * error
