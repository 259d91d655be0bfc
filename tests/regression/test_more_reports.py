"""Faults from public reports that CASES does not list. The number after a name is the report's."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import AdaLoraConfig, PeftModel, get_peft_model
from tokenizers import processors
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_alpharl.rewards.runner import RewardRunner
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.rollout.prompts import PromptTokenizer

pytestmark = pytest.mark.trl_compat
SAVES = {"save_strategy": "steps", "save_steps": 1, "total_episodes": 8, "num_ppo_epochs": 1}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "total_episodes": 16, "num_ppo_epochs": 1}
TURNS = [{"role": "user", "content": "w5"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}{% if tools %}w{{ 20 + tools|length }} {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}w9{% endif %}"
)


def adding(tokenizer, single):
    """The tokenizer, with `single` as its template of special tokens: <pad> is the first token, <eos> the last."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<pad>"
    special = [("<pad>", 0), ("<eos>", 1)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


# Prompts


def test_trl_1400_a_text_that_brings_its_first_token_gets_no_second(tokenizer):
    """As after `tokenizer.apply_chat_template(..., tokenize=False)` in a script."""
    prompts = PromptTokenizer(adding(tokenizer, "<pad> $A"))
    assert prompts([{"prompt": "w5 w6"}, {"prompt": "<pad> w5"}]) == [[0, 5, 6], [0, 5]]
    assert PromptTokenizer(tokenizer)([{"prompt": "<pad> <pad> w5"}]) == [[0, 0, 5]]  # no token of the tokenizer's


def test_vllm_7492_an_end_that_the_tokenizer_adds_is_no_part_of_a_prompt(tokenizer):
    prompts = PromptTokenizer(adding(tokenizer, "$A <eos>"))
    assert prompts([{"prompt": "w5 w6"}, {"prompt": "w5 <eos>"}]) == [[5, 6], [5, 1]]
    assert PromptTokenizer(tokenizer)([{"prompt": "w5 <eos>"}]) == [[5, 1]]


def test_trl_4350_a_rows_tools_and_template_arguments_reach_the_template(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    prompts = PromptTokenizer(tokenizer)
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    rows = [
        {"prompt": TURNS},
        {"prompt": TURNS, "tools": [tool, tool]},
        {"prompt": TURNS, "tools": json.dumps([tool])},
        {"prompt": TURNS, "tools": None, "chat_template_kwargs": {"enable_thinking": False, "other": None}},
    ]
    assert prompts(rows) == [[5], [5, 22], [5, 21], [5, 9]]
    everywhere = PromptTokenizer(tokenizer, chat_template_kwargs={"enable_thinking": False})
    thinking = {"prompt": TURNS, "chat_template_kwargs": {"enable_thinking": True}}
    assert everywhere([rows[0], thinking]) == [[5, 9], [5]]
    with pytest.raises(
        ValueError, match="`tools` beside a chat prompt must be a list of tools or its JSON, found 'hammer'"
    ):
        prompts([{"prompt": TURNS, "tools": "hammer"}])


def test_trl_4350_template_arguments_of_the_config_reach_every_prompt(trainer, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    for given in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        run = trainer(
            train_dataset=Dataset.from_dict({"prompt": [TURNS]}),
            processing_class=tokenizer,
            chat_template_kwargs=given,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        )
        assert run.rollout(0).prompt_ids.tolist() == [[5, 9]] * 8


def test_token_ids_of_no_shape_are_one_line_each(tokenizer):
    prompts = PromptTokenizer(tokenizer)
    prompts.num_embeddings = 64
    for row, line in (
        ({"input_ids": [[3, 4]]}, r"must be one list of token ids, found the shape \(1, 2\)"),
        ({"input_ids": [3, -100]}, "token id -100"),
        ({"input_ids": [3, 4], "attention_mask": [1]}, "`attention_mask` of a row has 1 entries for 2 input_ids"),
    ):
        with pytest.raises(ValueError, match=line):
            prompts([row])
    lists = PromptTokenizer(tokenizer, lambda rows: {"input_ids": [[0, 5]], "attention_mask": [[0, 1]]})
    assert lists([{"input_ids": [5]}]) == [[5]]


def test_rows_that_would_end_a_run_in_its_middle_are_refused_before_it(trainer):
    import pandas

    good = ["w5"] * 5
    for given, line in (
        (Dataset.from_dict({"prompt": [*good, None]}), r"train_dataset\.prompt is None in row 5"),
        (Dataset.from_dict({"prompt": [*good, ""]}), r"train_dataset\.prompt is '' in row 5"),
        (pandas.DataFrame({"prompt": good}), "train_dataset is a DataFrame whose first row is not"),
        (Dataset.from_dict({"messages": [TURNS]}), "Rename 'messages' to 'prompt'"),
        ([{"prompt": [{"from": "human", "value": "w5"}]}], "dicts with `role` and `content`"),
    ):
        with pytest.raises((ValueError, TypeError), match=line):
            trainer(train_dataset=given)


def test_an_empty_text_is_a_prompt_where_the_tokenizer_gives_it_a_first_token(trainer, tokenizer):
    data = Dataset.from_dict({"prompt": ["w5", ""]})
    run = trainer(train_dataset=data, processing_class=adding(tokenizer, "<pad> $A"), total_episodes=8)
    run.train()
    assert run.state.global_step == 2


@pytest.mark.parametrize("given", [Dataset.from_dict({"text": ["w5"]}), Dataset.from_dict({"prompt": [None]})])
def test_a_dataset_passed_to_evaluate_is_checked(trainer, given):
    with pytest.raises((ValueError, TypeError), match="eval_dataset"):
        trainer().evaluate(given)


# Roles


def test_trl_1977_what_cannot_have_a_role_is_one_line(trainer):
    with pytest.raises(TypeError, match=r"reward_model is a Linear; a transformers model, or a function \(completions"):
        trainer(reward_model=nn.Linear(2, 1))
    with pytest.raises(TypeError, match="ref_model is a str; a loaded model is needed"):
        trainer(ref_model="some/model")
    with pytest.raises(ValueError, match="max_grad_norm is None; it must be 0 or more"):
        trainer(max_grad_norm=None)


def test_a_model_is_loaded_from_a_path_object_in_the_precision_that_is_asked_for(trainer, model, tmp_path):
    model.save_pretrained(tmp_path / "policy")
    for name in ("dtype", "torch_dtype"):
        run = trainer(model=tmp_path / "policy", model_init_kwargs={name: "bfloat16"})
        assert run.policy_model.dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["add_adapter", "get_peft_model"])
def test_a_model_with_adapter_layers_that_is_no_peft_model_is_refused(model, lora, way):
    """Nothing but the critic would learn."""
    if way == "add_adapter":
        from peft import inject_adapter_in_model

        inject_adapter_in_model(lora, model)
    else:
        get_peft_model(model, lora)
    with pytest.raises(ValueError, match="model has adapter layers, but is no PeftModel"):
        ActorCritic(model)


def test_a_mixture_of_experts_that_reports_its_routing_is_sampled_from(trainer):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = MixtralConfig(**sizes, **ids, num_key_value_heads=2, num_local_experts=2, output_router_logits=True)
    run = trainer(model=MixtralForCausalLM(config), total_episodes=8)
    run.train()
    assert run.state.log_history[0]["val/ratio"] == 1.0
    assert run.model.config.output_router_logits is True


def test_a_model_without_weights_is_refused(trainer, model):
    with pytest.raises(ValueError, match="model has no weights"):
        trainer(model=model.to("meta"))


def test_adalora_is_refused(model):
    config = AdaLoraConfig(task_type="CAUSAL_LM", total_step=10, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"peft_config: PeftType\.ADALORA is not supported"):
        ActorCritic(get_peft_model(model, config))


def test_a_notebooks_cell_may_run_again(trainer, model, lora):
    """The trainer's own adapters of the first time give way; the policy stays."""
    first = trainer(peft_config=lora, critic="adapter", total_episodes=8)
    first.train()
    again = trainer(model=first.policy_model, critic="adapter", total_episodes=8)
    assert sorted(again.policy_model.peft_config) == ["critic", "default", "reference"]
    third = trainer(model=again.policy_model, critic="adapter", total_episodes=8, learning_rate=0.0)
    third.train()
    assert next(log["objective/kl"] for log in third.state.log_history if "objective/kl" in log) == 0.0


def test_a_reward_function_may_change_what_it_is_given():
    def strip(completions, answer, **kwargs):
        completions[0][0]["content"] = completions[0][0]["content"].strip()
        return [float(answer.pop() == "x")]

    seen = []

    def read(completions, answer, **kwargs):
        seen.append((completions, answer))
        return [0.0]

    completions = [[{"role": "assistant", "content": " w5 "}]]
    table = RewardRunner([strip, read])(["p"], completions, [[5]], {"answer": ["x"]})
    assert table.values == [[1.0, 0.0]]
    assert seen == [([[{"role": "assistant", "content": " w5 "}]], ["x"])]


def test_a_reward_function_may_leave_torch_without_gradients(trainer):
    def score(completions, **kwargs):
        torch.set_grad_enabled(False)
        return [float(len(text)) for text in completions]

    run = trainer(reward_funcs=score, total_episodes=8)
    run.train()
    assert torch.is_grad_enabled() and run.state.global_step == 2


def test_the_ratio_is_1_whatever_torchs_default_precision_is(trainer):
    torch.set_default_dtype(torch.bfloat16)
    try:
        run = trainer(total_episodes=8, num_ppo_epochs=1)
        run.train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert run.state.log_history[0]["val/ratio"] == 1.0
    assert run.model.value_head.weight.dtype == torch.float32


def test_what_is_asked_of_the_actor_critic_and_is_the_policys_is_told(trainer, lora):
    run = trainer(peft_config=lora)
    with pytest.raises(AttributeError, match=r"use trainer\.policy_model\.merge_and_unload\."):
        run.model.merge_and_unload()
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        run.model.nothing  # noqa: B018


# Saving and resuming


def test_openrlhf_212_a_generation_config_that_transformers_does_not_write(trainer, model):
    model.generation_config.temperature = 0.5  # without do_sample, as Llama 2 and Vicuna have it
    run = trainer(**SAVES)
    run.train()
    checkpoint = Path(run.args.output_dir) / "checkpoint-1"
    written = AutoModelForCausalLM.from_pretrained(checkpoint).generation_config
    assert (written.temperature, written.do_sample) == (0.5, True)
    assert not model.generation_config.do_sample


@pytest.mark.parametrize("adapted", [False, True])
def test_a_callback_saves_the_model_that_it_is_given(trainer, model, lora, tmp_path, adapted):
    base = copy.deepcopy(model)

    class Save(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            model.save_pretrained(tmp_path / "saved")

    run = trainer(callbacks=[Save()], peft_config=lora if adapted else None, total_episodes=8)
    run.train()
    kind, given = (PeftModel, (base,)) if adapted else (AutoModelForCausalLM, ())
    loaded = kind.from_pretrained(*given, tmp_path / "saved").eval()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, run.policy_model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"optim": "sgd"}, "was saved with optim='adamw.*'; this run has 'sgd'"),
        ({"critic_learning_rate": 1e-2}, "was saved with own_critic_learning_rate=False; this run has True"),
    ],
)
def test_an_optimizer_of_another_shape_does_not_resume(trainer, changes, line):
    run = trainer(**SAVES)
    run.train()
    with pytest.raises(ValueError, match=line):
        trainer(**SAVES, **changes).train(resume_from_checkpoint=True)


def test_a_whole_model_and_an_adapter_do_not_resume_each_other(trainer, lora):
    trainer(**SAVES).train()
    with pytest.raises(ValueError, match="holds a whole model, but this run trains an adapter"):
        trainer(**SAVES, peft_config=lora).train(resume_from_checkpoint=True)


def test_a_learning_rate_that_resuming_does_not_take_is_told(trainer):
    trainer(**SAVES).train()
    again = trainer(**{**SAVES, "total_episodes": 16}, learning_rate=5e-4, lr_scheduler_type="constant")
    with pytest.warns(UserWarning, match=r"no effect: learning_rate 0\.0005 \(saved: 0\.001\)"):
        again.train(resume_from_checkpoint=True)


# The best model


def test_trl_3384_the_best_model_is_that_of_the_highest_score(trainer, dataset):
    run = trainer(
        **EVALUATES,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        eval_dataset=dataset.select(range(4)),
    )
    run.train()
    scores = [log["eval_objective/scores"] for log in run.state.log_history if "eval_objective/scores" in log]
    assert run.state.best_metric == max(scores)


def test_trl_3384_a_metric_that_no_evaluation_has_is_refused_before_the_run(config):
    for name in ("eval_loss", "loss", "eval_reward"):
        with pytest.raises(ValueError, match=f"metric_for_best_model is '{name}', which no evaluation here has"):
            config(metric_for_best_model=name)


def test_a_plateau_is_one_of_the_score(config):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    assert config(**plateau).lr_scheduler_kwargs == {"mode": "max"}
    assert config(**plateau, metric_for_best_model="objective/kl", greater_is_better=False).lr_scheduler_kwargs == {
        "mode": "min"
    }
