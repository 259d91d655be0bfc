"""`lora_top_layers`: adapters on the last decoder layers and nowhere else, or one line that says why not."""

from __future__ import annotations

import copy

import pytest
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

LAYERS = 4  # of the model `deep`


def adapted_layers(run, adapter: str = "default") -> list[int]:
    names = [name for name, _ in run.policy_model.named_parameters() if f".{adapter}." in name]
    return sorted({int(name.split(".layers.")[1].split(".")[0]) for name in names if ".layers." in name})


@pytest.mark.parametrize("number", [1, 3, 4])
def test_adapters_are_on_the_last_layers_alone(trainer, deep, lora, number, tmp_path):
    before = copy.deepcopy(lora)
    run = trainer(model=deep, peft_config=lora, lora_top_layers=number, critic="adapter", max_steps=1)
    last = list(range(LAYERS - number, LAYERS))
    assert adapted_layers(run) == adapted_layers(run, "critic") == last
    assert lora == before  # the script's own is left alone
    run.train()
    run.save_model(str(tmp_path / "saved"))
    again = PeftModel.from_pretrained(type(deep)(deep.config), tmp_path / "saved")
    names = [name for name, _ in again.named_parameters() if "lora_" in name]
    assert sorted({int(name.split(".layers.")[1].split(".")[0]) for name in names}) == last


@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        LoraConfig(r=2, task_type="CAUSAL_LM"),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    ],
    ids=["all-linear", "peft's choice", "with a copied head"],
)
def test_whatever_modules_the_adapter_is_for(trainer, deep, adapter):
    run = trainer(model=deep, peft_config=adapter, lora_top_layers=1, cache_frozen_layers=True)
    assert adapted_layers(run) == [LAYERS - 1]


LISTED = {"r": 2, "task_type": "CAUSAL_LM"}
REFUSED = {
    "no adapter": ({"peft_config": None}, "lora_top_layers is set, but there is no fresh adapter; pass peft_config"),
    "layers given": (
        {"peft_config": LoraConfig(**LISTED, target_modules=["q_proj"], layers_to_transform=[0])},
        "lora_top_layers and peft_config.layers_to_transform are both set",
    ),
    "a pattern": (
        {"peft_config": LoraConfig(**LISTED, target_modules=".*q_proj")},
        "lora_top_layers and layers in peft_config.target_modules are both set",
    ),
    "a layer's name": (
        {"peft_config": LoraConfig(**LISTED, target_modules=["model.layers.0.self_attn.q_proj"])},
        "lora_top_layers and layers in peft_config.target_modules are both set",
    ),
    "another adapter": (
        {"peft_config": IA3Config(target_modules=["v_proj"], feedforward_modules=[])},
        "lora_top_layers: a IA3Config goes on all layers",
    ),
    "too many": ({"lora_top_layers": LAYERS + 1}, f"lora_top_layers is {LAYERS + 1}; model has {LAYERS} layers"),
    "none": ({"lora_top_layers": 0}, "lora_top_layers is 0; it must be a whole number, at least 1"),
    "a share": ({"lora_top_layers": 0.5}, "lora_top_layers is 0.5; it must be a whole number, at least 1"),
    "a switch": ({"lora_top_layers": True}, "lora_top_layers is True; it must be a whole number, at least 1"),
    "nothing frozen": ({"lora_top_layers": None, "cache_frozen_layers": True}, "cache_frozen_layers: model has no"),
    "all layers adapted": ({"lora_top_layers": LAYERS, "cache_frozen_layers": True}, "cache_frozen_layers: model has"),
    "nothing to merge": (
        {"peft_config": None, "lora_top_layers": None, "merge_lora_in_rollouts": True},
        "merge_lora_in_rollouts is true, but model has no adapter that can be added",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(trainer, deep, lora, case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        trainer(model=deep, **{"peft_config": lora, "lora_top_layers": 2, **copy.deepcopy(changes)})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_policy_that_comes_with_its_adapter_is_not_fresh(trainer, deep, lora):
    with pytest.raises(ValueError, match="lora_top_layers is set, but there is no fresh adapter"):
        trainer(model=get_peft_model(deep, lora), lora_top_layers=1)
