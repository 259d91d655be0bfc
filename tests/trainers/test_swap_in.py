"""Scripts of other trainers run here with only their import lines changed, on every TRL that is supported."""

import copy
import inspect
import runpy
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trl_alpharl import PPOConfig, PPOTrainer

pytestmark = pytest.mark.trl_compat
SCRIPTS = Path(__file__).parent / "scripts"
IMPORTS = {
    "from trl.experimental.ppo import PPOConfig, PPOTrainer": "from trl_alpharl import PPOConfig, PPOTrainer",
    "from trl import GRPOConfig, GRPOTrainer": (
        "from trl_alpharl import PPOConfig as GRPOConfig, PPOTrainer as GRPOTrainer"
    ),
}
# What TRL 1.12's trainer logs after every rollout.
METRICS_1_12 = {
    "eps",
    "episode",
    "epoch",
    "lr",
    "step",
    *(f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores")),
    *(f"policy/{name}_avg" for name in ("approxkl", "clipfrac", "entropy")),
    *(f"loss/{name}_avg" for name in ("policy", "value")),
    *(f"val/{name}" for name in ("clipfrac_avg", "ratio", "ratio_var", "num_eos_tokens")),
}
ARGUMENTS_1_12 = [
    *("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    *("data_collator", "eval_dataset", "optimizers", "callbacks", "peft_config"),
]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}{{ 'w2' }}{% endif %}"


@pytest.fixture
def hub(monkeypatch):
    """A hub that only writes down what is uploaded: (repository, commit message, names of the files)."""
    uploads = []

    class Hub:
        def create_repo(self, name, **kwargs):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, repo_id, folder_path, commit_message, **kwargs):
            names = {str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")}
            uploads.append((repo_id, commit_message, names))
            done = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    return uploads


@pytest.fixture
def run_script(tmp_path, monkeypatch, model, classifier, tokenizer, dataset):
    """Runs a script of scripts/ in its own name space, which is returned; with its import line swapped unless `own`."""
    for name, saved in (("policy", model), ("reward", classifier)):
        saved.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    dataset.to_json(tmp_path / "prompts.jsonl")

    def run(name, *flags, own=False, **names):
        text = (SCRIPTS / name).read_text()
        if not own:
            old, new = next((old, new) for old, new in IMPORTS.items() if old in text)
            text = text.replace(old, new)
        script = tmp_path / name
        script.write_text(text)
        monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
        return runpy.run_path(str(script), names, run_name="__main__")

    return run


def flags_of_1_12(folder, **changes):
    values = {
        "dataset_name": folder / "prompts.jsonl",
        "output_dir": folder / "out",
        "model_name_or_path": folder / "policy",
        "sft_model_path": folder / "policy",
        "reward_model_path": folder / "reward",
        "total_episodes": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_ppo_epochs": 2,
        "response_length": 6,
        "missing_eos_penalty": 1.0,
        "stop_token": "eos",
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "push_to_hub": True,
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", value)]


# ---- TRL 1.12's scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_peft", [False, True])
def test_a_script_for_trl_1_12_runs_with_only_its_import_line_changed(run_script, hub, tmp_path, capsys, use_peft):
    names = run_script("written_for_trl_1_12.py", *flags_of_1_12(tmp_path, use_peft=use_peft))
    trainer = names["trainer"]
    assert type(trainer) is PPOTrainer
    assert names["steps"] == trainer.state.global_step == 4  # 2 rollouts x 2 epochs; the script's callback counted them
    logged = set().union(*trainer.state.log_history)
    assert logged >= METRICS_1_12

    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto = AutoPeftModelForCausalLM if use_peft else AutoModelForCausalLM
    saved = auto.from_pretrained(tmp_path / "out")
    inner = saved.get_base_model() if use_peft else saved
    trained = trainer.policy_model.get_base_model() if use_peft else trainer.policy_model
    ids = torch.tensor([[5, 9, 12]])
    torch.testing.assert_close(inner(ids).logits, trained(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w9")["input_ids"] == [5, 9]

    repository, _, files = hub[-1]
    assert repository == "me/out"
    assert {"README.md", "adapter_config.json" if use_peft else "config.json"} <= files
    card = (tmp_path / "out" / "README.md").read_text()
    assert "ppo" in card and "prompts" in card
    assert "model response" in capsys.readouterr().out


def test_the_same_script_logs_the_same_kinds_of_metrics_on_trl_1_12s_own_trainer(run_script, hub, tmp_path):
    pytest.importorskip("trl.experimental.ppo", exc_type=ImportError)
    names = run_script("written_for_trl_1_12.py", *flags_of_1_12(tmp_path), own=True)
    theirs = names["trainer"].state.log_history
    assert set().union(*theirs) == METRICS_1_12  # the table above is what 1.12 logs
    assert names["steps"] == 2  # its steps are rollouts


def test_arguments_stand_in_1_12s_order(trainer, config, model, classifier, tokenizer, dataset):
    parameters = inspect.signature(PPOTrainer.__init__).parameters
    assert list(parameters)[1:] == [*ARGUMENTS_1_12, "reward_funcs", "reward_processing_classes"]
    extra = [parameters[name].kind for name in ("reward_funcs", "reward_processing_classes")]
    assert extra == [inspect.Parameter.KEYWORD_ONLY] * 2
    run = PPOTrainer(
        config(max_steps=1),
        tokenizer,
        model,
        copy.deepcopy(model),
        classifier,
        tokenized(dataset, tokenizer),
        copy.deepcopy(classifier),
    )
    run.train()
    assert run.state.global_step == 1


def test_1_12_has_the_arguments_in_this_order():
    ppo = pytest.importorskip("trl.experimental.ppo", exc_type=ImportError)
    assert list(inspect.signature(ppo.PPOTrainer.__init__).parameters)[1:] == ARGUMENTS_1_12


def test_a_reward_model_saved_without_its_tokenizer_reads_the_policys(
    trainer, classifier, tokenizer, model, tmp_path, dataset
):
    """1.12 fed the policy's token ids to the reward model, so its folder often has no tokenizer."""
    from transformers import AutoModelForSequenceClassification

    classifier.save_pretrained(tmp_path / "bare")
    reward_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bare", num_labels=1)
    with pytest.warns(UserWarning, match=r"bare' has no tokenizer of its own.* reward_processing_classes"):
        run = trainer(reward_model=reward_model)
    scored = run.score(run.rollout())
    expected = run.reward_runner.reward_funcs[0](*run._texts(scored.rollout)[:2])
    assert scored.scores.tolist() == pytest.approx(expected)


# ---- GRPO's style ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_grpo_style_script_runs_with_only_its_import_line_changed(run_script, tmp_path, tokenizer, dataset, kind):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "policy")
    as_kind = (lambda text: text) if kind == "text" else (lambda text: [{"role": "user", "content": text}])
    rows = dataset.map(lambda row, at: {"prompt": as_kind(row["prompt"]), "answer": f"w{at + 2}"}, with_indices=True)
    rows = rows.select(range(62))
    rows.to_json(tmp_path / "rows.jsonl")

    names = run_script("grpo_style.py", MODEL=str(tmp_path / "policy"), DATA=str(tmp_path / "rows.jsonl"))
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["reward/near_the_answer/mean"] >= 0
    answers = {str(row["prompt"]): row["answer"] for row in rows}
    assert len(names["seen"]) == 8  # one rollout; both steps train on it
    for prompt, _, answer in names["seen"]:
        assert answers[str(prompt)] == answer
    assert (tmp_path / "policy-trained" / "config.json").is_file()


def half(completions, **kwargs):
    return [0.5 if row % 2 else None for row in range(len(completions))]


async def slowly(completions, **kwargs):
    return [1.0 if row % 4 else None for row in range(len(completions))]


def tokenized(dataset, tokenizer):
    """The dataset as TRL 1.12's scripts made it: token ids and nothing else."""
    return dataset.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=["prompt"])


@pytest.mark.parametrize("kind", ["text", "chat", "input_ids", "input_ids and a mask"])
def test_case_19_prompts_as_text_chat_turns_and_ids(trainer, tokenizer, dataset, kind):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    if kind == "chat":
        rows = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    elif kind == "text":
        rows = dataset
    else:
        rows = tokenized(dataset, tokenizer)
    if kind == "input_ids and a mask":  # the first id is padding
        rows = rows.map(
            lambda row: {"input_ids": [63, *row["input_ids"]], "attention_mask": [0] + [1] * len(row["input_ids"])}
        )
    run = trainer(train_dataset=rows, processing_class=tokenizer, reward_funcs=half)
    run.train()
    assert run.state.global_step == 4
    at = run.sample_prompts(0)
    expected = [tokenizer(dataset[row]["prompt"])["input_ids"] for row in at]
    if kind == "chat":
        expected = [[*ids, 2] for ids in expected]  # the template's w2 asks for an answer
    rollout = run.rollout(0)
    assert [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)] == expected


def test_case_20_a_reward_reads_the_answer_as_it_continues_the_prompt(trainer, tokenizer, dataset):
    """A tokenizer that writes a space between words must not lose the one between prompt and answer."""
    read = []

    def whole(prompts, completions, **kwargs):
        read.extend(prompt + completion for prompt, completion in zip(prompts, completions))
        return [0.0] * len(prompts)

    run = trainer(train_dataset=tokenized(dataset, tokenizer), reward_funcs=whole)
    rollout = run.score(run.rollout()).rollout
    for row, text in enumerate(read):
        prompt, answer = rollout.prompt_ids[row], rollout.completion_ids[row]
        ids = [*prompt[rollout.prompt_mask[row]].tolist(), *answer[rollout.completion_mask[row]].tolist()]
        assert tokenizer(text)["input_ids"] == [i for i in ids if i > 1]  # but for pad and eos


@pytest.mark.parametrize("peft", [False, True])
def test_case_21_sync_and_async_rewards_and_none(trainer, model, lora, peft):
    if peft:
        from peft import get_peft_model

        model = get_peft_model(model, lora)
    run = trainer(model=model, reward_funcs=[half, slowly], reward_weights=[1.0, 2.0])
    scored = run.score(run.rollout())
    assert scored.valid.tolist() == [False, True, True, True] * 2
    assert scored.scores.tolist() == [0.0, 2.5, 2.0, 2.5] * 2
    run.train()
    first = run.state.log_history[0]
    assert first["reward/half/mean"] == 0.5  # None is no 0
    assert first["objective/scores"] > 0


def test_case_22_a_reward_model_with_another_vocabulary(trainer, dataset):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    letters = {"<pad>": 0} | {letter: at + 1 for at, letter in enumerate("w 0123456789")}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    reward_model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=len(letters), num_labels=1, pad_token_id=0, **sizes)
    )
    with pytest.raises(ValueError, match="reward_processing_classes"):
        trainer(reward_model=reward_model)
    run = trainer(reward_model=reward_model, reward_processing_classes=own)
    scored = run.score(run.rollout())
    for row, (prompt, answer) in enumerate(zip(*run._texts(scored.rollout)[:2])):
        ids = torch.tensor([own(prompt + answer)["input_ids"]])
        assert len(ids[0]) == len(prompt + answer)
        assert scored.scores[row].item() == pytest.approx(reward_model(ids).logits.item(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_case_23_without_value_model_and_reward_model_a_critic_is_made_and_learns(trainer, lora, critic):
    run = trainer(
        critic=critic,
        peft_config=lora if critic == "adapter" else None,
        total_episodes=20 * 32,
        per_device_train_batch_size=8,
        num_ppo_epochs=4,
        learning_rate=3e-3,
        vf_coef=1.0,
        response_length=3,
        cliprange_value=10.0,
        reward_funcs=lambda prompts, **kwargs: [float(prompt.split()[-1].removeprefix("w")) / 32 for prompt in prompts],
    )
    run.train()
    explained = [log["val/explained_variance"] for log in run.state.log_history if "val/explained_variance" in log]
    assert len(explained) == 20
    assert explained[0] == pytest.approx(0, abs=1e-6)  # the head starts at 0
    assert sum(explained[-5:]) / 5 > 0.4 > 0.2 > sum(explained[:3]) / 3


def test_case_24_max_steps_1_is_one_optimizer_step(trainer):
    run = trainer(max_steps=1, num_mini_batches=2)
    steps = []
    run.create_optimizer_and_scheduler(1)
    run.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    run.train()
    assert run.state.global_step == len(steps) == 1


def test_optimizers_and_callbacks_of_the_script_are_the_ones_in_use(trainer, model):
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self):
            self.events = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.events.append("begin")

        def on_step_end(self, args, state, control, **kwargs):
            self.events.append("step")

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.events.append("log")

    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([model.lm_head.weight], lr=0.5)  # of all weights only the head's
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    watch = Watch()
    run = trainer(optimizers=(optimizer, scheduler), callbacks=[watch], total_episodes=8)
    run.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"lm_head.weight"}
    assert run.state.log_history[0]["lr"] == 0.25
    assert watch.events == ["begin", "step", "log", "step", "log", "log"]  # the last: the run's summary


def test_a_config_of_another_class_is_refused_in_one_line(trainer, tmp_path):
    from transformers import TrainingArguments

    with pytest.raises(TypeError, match="args is a TrainingArguments; PPOTrainer needs a PPOConfig"):
        trainer(args=TrainingArguments(output_dir=str(tmp_path)))
    assert PPOTrainer.config_class is PPOConfig
