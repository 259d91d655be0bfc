"""What users pass becomes what the trainer holds; what cannot work is one line that names the argument."""

import copy

import pytest
import torch
from torch import nn

from trl_alpharl.rewards.model import RewardModel
from trl_alpharl.trainers import inputs


def one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return True


# ---- Tokenizer and policy --------------------------------------------------------------------------------------------


def test_the_tokenizer_is_loaded_by_the_models_name(model, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    for given in (str(tmp_path), model):
        assert inputs.load_tokenizer(None, given).get_vocab() == tokenizer.get_vocab()
    assert inputs.load_tokenizer(tokenizer, model) is tokenizer


def test_a_nameless_model_needs_a_tokenizer(model):
    with pytest.raises(ValueError, match="processing_class is missing") as error:
        inputs.load_tokenizer(None, model)
    assert one_line(error)


def test_a_processor_is_refused():
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        attributes = []

        def __init__(self):
            pass

    with pytest.raises(TypeError, match="processing_class is a Processor; a tokenizer is needed"):
        inputs.load_tokenizer(Processor(), None)


def test_a_policy_by_name_is_loaded_in_fp32_or_as_told(model, tmp_path):
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert inputs.load_policy(str(tmp_path), None, None).dtype is torch.float32
    assert inputs.load_policy(str(tmp_path), {"dtype": "bfloat16"}, None).dtype is torch.bfloat16
    with pytest.raises(OSError, match="no-such-folder"):
        inputs.load_policy("./no-such-folder", None, None)


def test_an_encoder_decoder_is_refused_before_its_weights_load(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, T5Config

    T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2).save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ValueError, match="model: encoder-decoder"):
        inputs.load_policy(str(tmp_path), None, None)


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), 3, None])
def test_a_policy_of_another_kind_is_refused(wrong):
    with pytest.raises(TypeError, match=f"model is a {type(wrong).__name__}; a transformers model or its name"):
        inputs.load_policy(wrong, None, None)


def test_init_kwargs_for_a_model_that_is_loaded_are_refused(model):
    with pytest.raises(ValueError, match="model_init_kwargs is set, but model is already loaded"):
        inputs.load_policy(model, {"dtype": "float32"}, None)


def test_peft_config_wraps_the_policy_once(model, lora):
    from peft import PeftModel

    wrapped = inputs.load_policy(model, None, lora)
    assert isinstance(wrapped, PeftModel)
    with pytest.raises(ValueError, match="model is a PeftModel already"):
        inputs.load_policy(wrapped, None, lora)
    with pytest.raises(TypeError, match=r"peft_config is a dict; a peft\.PeftConfig"):
        inputs.load_policy(model, None, {"r": 4})


def test_a_saved_adapter_learns_on(model, lora, tmp_path):
    from peft import PeftModel, get_peft_model

    model.save_pretrained(tmp_path / "base")
    policy = get_peft_model(type(model).from_pretrained(tmp_path / "base"), lora)
    policy.save_pretrained(tmp_path / "adapter")
    folder = str(tmp_path / "adapter")
    loaded = inputs.load_policy(folder, {"dtype": "bfloat16"}, None)
    assert isinstance(loaded, PeftModel)
    assert loaded.get_base_model().lm_head.weight.dtype is torch.bfloat16
    assert any(parameter.requires_grad for parameter in loaded.parameters())
    with pytest.raises(ValueError, match=r"model: .*adapter is a saved adapter; pass it without peft_config"):
        inputs.load_policy(folder, None, lora)
    inputs.check_roles(folder, None, None, "adapter", None)
    policy.peft_config["default"].base_model_name_or_path = None
    policy.peft_config["default"].save_pretrained(folder)
    with pytest.raises(ValueError, match="names no base model"):
        inputs.load_policy(folder, None, None)


def test_a_critic_without_a_place_is_refused_before_weights_load(model, classifier, lora):
    with pytest.raises(ValueError, match="value_model is the same object as model"):
        inputs.check_roles(model, None, model, "shared", None)
    for given in (model, "some/model"):
        with pytest.raises(ValueError, match="critic='adapter' needs a LoRA policy"):
            inputs.check_roles(given, None, None, "adapter", None)
        inputs.check_roles(given, None, None, "adapter", lora)
        inputs.check_roles(given, None, classifier, "adapter", None)


# ---- Value model -----------------------------------------------------------------------------------------------------


def test_value_models_that_cannot_be_a_critic_are_refused(model, classifier):
    def other(**changes):
        config = copy.deepcopy(classifier.config)
        for name, value in changes.items():
            setattr(config, name, value)
        return type(classifier)(config)

    assert inputs.prepare_value_model(None, model, 64) is None
    assert inputs.prepare_value_model(classifier, model, 64) is classifier
    with pytest.raises(TypeError, match="value_model is a str; a sequence classification model"):
        inputs.prepare_value_model("name", model, 64)
    with pytest.raises(ValueError, match="value_model has num_labels=2; a critic needs num_labels=1"):
        inputs.prepare_value_model(other(num_labels=2), model, 64)
    with pytest.raises(ValueError, match="value_model embeds 60 tokens, fewer than the 64"):
        inputs.prepare_value_model(other(vocab_size=60), model, 64)


def test_a_tokenizer_with_a_pad_token_of_its_own_needs_no_larger_models(trainer, tokenizer, classifier):
    """TRL 1.12's scripts added [PAD] without resizing anything."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 64 == classifier.config.vocab_size
    run = trainer(processing_class=tokenizer, value_model=classifier, stop_token_id=5, response_length=16)
    assert run.sampling.pad_id == 1  # eos: any id that is embedded will do
    run.train()
    assert run.state.global_step == 4


@pytest.mark.slow
def test_a_quantized_value_model_gets_an_adapter_like_the_policys(model, classifier, lora):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit
    from peft import PeftModel, get_peft_model

    layer = classifier.model.layers[0].self_attn
    layer.q_proj = Linear4bit(64, 64, bias=False)
    with pytest.raises(ValueError, match="value_model is quantized; wrap it with get_peft_model"):
        inputs.prepare_value_model(classifier, model, 64)
    wrapped = inputs.prepare_value_model(classifier, get_peft_model(model, lora), 64)
    assert isinstance(wrapped, PeftModel)
    learning = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert any("score" in name for name in learning) and any("lora_A" in name for name in learning)


# ---- Rewards ---------------------------------------------------------------------------------------------------------


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def test_rewards_of_every_kind_in_order(model, classifier, tokenizer, tmp_path):
    saved = tmp_path / "folder"
    classifier.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    rewards = inputs.resolve_rewards([constant, "exact_match", str(saved)], classifier, None, tokenizer, model)
    assert isinstance(rewards[0], RewardModel) and rewards[0].model is classifier  # TRL 1.12's comes first
    assert rewards[1] is constant
    assert rewards[2].__name__ == "exact_match"
    assert isinstance(rewards[3], RewardModel)
    for one in (constant, [constant], (constant,)):
        assert inputs.resolve_rewards(one, None, None, tokenizer, model) == [constant]


def test_what_is_no_reward_is_refused_in_one_line(model, tokenizer):
    for given, kind, parts in (
        (None, ValueError, ["no reward: pass reward_funcs", "reward_model"]),
        ([], ValueError, ["no reward"]),
        ([3], TypeError, ["a reward must be a callable, a name or a model, found int"]),
        ("exact_mach", ValueError, ["'exact_mach'", "did you mean 'exact_match'?"]),
        ("no/such-model", ValueError, ["'no/such-model' is no model that loads"]),
    ):
        with pytest.raises(kind) as error:
            inputs.resolve_rewards(given, None, None, tokenizer, model)
        assert one_line(error, *parts)


def test_named_rewards_are_looked_up_and_weights_counted_without_a_policy(classifier):
    first, second = inputs.list_rewards("exact_match", classifier, [1.0, 0.5])
    assert first is classifier and second.__name__ == "exact_match"
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2 reward functions"):
        inputs.list_rewards([constant, "exact_match"], None, [1.0])


def test_reward_processing_classes_are_one_for_all_or_one_each(model, classifier, tokenizer):
    other = copy.deepcopy(classifier)
    for given in (tokenizer, [tokenizer, tokenizer]):
        rewards = inputs.resolve_rewards([classifier, other], None, given, None, model)
        assert [reward.tokenizer for reward in rewards] == [tokenizer, tokenizer]
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries for 2 rewards"):
        inputs.resolve_rewards([classifier, other], None, [tokenizer], None, model)


def test_a_reward_model_reads_with_its_own_tokenizer(model, classifier, tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.model_max_length = 77
    own.save_pretrained(tmp_path)
    classifier.config._name_or_path = str(tmp_path)
    (reward,) = inputs.resolve_rewards(None, classifier, None, tokenizer, model)
    assert reward.tokenizer.model_max_length == 77


def test_a_reward_model_that_is_also_the_critic_is_refused(trainer, classifier):
    """Freezing the reward would freeze the critic; training the critic would change the reward."""
    with pytest.raises(ValueError, match="reward_model shares weights with value_model"):
        trainer(reward_model=classifier, value_model=classifier)


# ---- Datasets --------------------------------------------------------------------------------------------------------


def test_datasets_that_cannot_be_read_are_refused(trainer, dataset):
    from datasets import Dataset, DatasetDict

    for given, kind, parts in (
        (None, ValueError, ["train_dataset is required", "`input_ids`"]),
        (dataset.select([]), ValueError, ["train_dataset has no rows"]),
        (dataset.to_iterable_dataset(), TypeError, ["train_dataset is a IterableDataset without a length"]),
        (DatasetDict(train=dataset), TypeError, ["train_dataset is a DatasetDict with 'train'; pass one of them"]),
        ("some/dataset", TypeError, ["train_dataset is the text 'some/dataset'"]),
        (["w5", "w6"], TypeError, ["train_dataset holds rows of type str"]),
        (Dataset.from_dict({"prompt": [3]}), TypeError, ["train_dataset.prompt is '3' (int)"]),
        ([{"prompt": None}], TypeError, ["train_dataset.prompt is 'None' (NoneType)"]),
        ([{"prompt": []}], TypeError, ["train_dataset.prompt is '[]' (list)"]),
        (Dataset.from_dict({"text": ["w5"]}), ValueError, ["train_dataset needs a `prompt`", "['text']"]),
        (Dataset.from_dict({"prompt": [[{"role": "user", "content": "w5"}]]}), ValueError, ["no chat template"]),
    ):
        with pytest.raises(kind) as error:
            trainer(train_dataset=given)
        assert one_line(error, *parts)


@pytest.mark.parametrize("given", [{"held out": None}, {"held out": []}])
def test_each_of_several_eval_datasets_is_checked(trainer, given):
    with pytest.raises(ValueError, match=r"eval_dataset\['held out'\]"):
        trainer(eval_dataset=given)


def test_an_empty_dict_of_eval_datasets_is_refused(trainer):
    with pytest.raises(ValueError, match="eval_dataset is an empty dict"):
        trainer(eval_dataset={})


# ---- Callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_are_none_one_or_a_list():
    from transformers import TrainerCallback

    one = TrainerCallback()
    assert inputs.callback_list(None) == []
    assert inputs.callback_list(one) == inputs.callback_list([one]) == [one]
    assert inputs.callback_list(TrainerCallback) == [TrainerCallback]
    with pytest.raises(TypeError, match="callbacks holds a str"):
        inputs.callback_list("progress")


# ---- Optimizer -------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_the_script_learns_about_the_value_head(trainer, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = trainer(optimizers=(optimizer, None))
    known = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    assert id(run.model.value_head.weight) in known
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_made_before_the_adapter_is_refused(trainer, model, classifier, lora):
    optimizer = torch.optim.AdamW([*model.parameters(), *classifier.parameters()], lr=1e-3)
    with pytest.raises(ValueError, match=r"optimizers: .* no parameter that the policy trains; wrap .* get_peft_model"):
        trainer(optimizers=(optimizer, None), peft_config=lora, value_model=classifier)


def test_the_critics_learning_rate_is_no_matter_of_a_passed_optimizer(trainer, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="critic_learning_rate is set, but optimizers is passed"):
        trainer(optimizers=(optimizer, None), critic_learning_rate=1e-2)


def test_the_critics_own_parameters_get_their_own_learning_rate(trainer):
    run = trainer(critic_learning_rate=1e-2)
    run.create_optimizer()
    rates = {id(p): group["lr"] for group in run.optimizer.param_groups for p in group["params"]}
    assert rates.pop(id(run.model.value_head.weight)) == 1e-2
    assert set(rates.values()) == {1e-3}
    assert len(rates) == len(list(run.policy_model.parameters()))


@pytest.mark.parametrize("engine", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_an_engine_that_only_the_launcher_chose_is_refused(trainer, monkeypatch, engine):
    from transformers import Trainer

    made = Trainer.__init__

    def launched(self, *args, **kwargs):
        made(self, *args, **kwargs)
        setattr(self, engine, True)

    monkeypatch.setattr(Trainer, "__init__", launched)
    monkeypatch.setattr("trl_alpharl.trainers.ppo_trainer.PPOTrainer._send_telemetry", lambda self: None)
    with pytest.raises(ValueError, match="FSDP and DeepSpeed are not supported"):
        trainer()
