from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trl_alpharl import recipe as recipe_module
from trl_alpharl.recipe import COMPUTED, Recipe, RecipeError, find_recipe, load_recipe, shipped_recipes


@pytest.fixture
def write(tmp_path):
    """Writes a recipe's text and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def load(write, text: str = "", *flags: str) -> dict:
    return dict(load_recipe(write(f"method: ppo\n{text}"), flags).values)


def test_flags_win_and_only_given_values_are_kept(write):
    path = write("method: ppo\nseed: 1\nlearning_rate: 1e-3\nuse_peft: yes\nreward_funcs: [a]\n")
    recipe = load_recipe(path, ["--seed", "2", "--lora-r=8"])
    assert recipe == Recipe(
        "my",
        Path(path),
        {"method": "ppo", "seed": 2, "learning_rate": 0.001, "use_peft": True, "reward_funcs": ["a"], "lora_r": 8},
    )
    assert recipe.section("ppo") == {"seed": 2, "learning_rate": 0.001}
    assert recipe.section("model") == {"use_peft": True, "lora_r": 8}
    assert recipe.section("script") == {"method": "ppo", "reward_funcs": ["a"]}
    with pytest.raises(ValueError, match="section: found 'trainer', expected one of ppo, arpo, model, script"):
        recipe.section("trainer")


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("--reward_funcs a b", {"reward_funcs": ["a", "b"]}),
        ("--reward_funcs a --reward_funcs b", {"reward_funcs": ["a", "b"]}),
        ("--reward_funcs [a,b]", {"reward_funcs": ["a", "b"]}),
        ("--reward_funcs [a,b] --reward_funcs c", {"reward_funcs": ["a", "b", "c"]}),
        ("--reward_funcs none", {"reward_funcs": None}),
        ("--report_to trackio", {"report_to": "trackio"}),
        ("--report_to trackio tensorboard", {"report_to": ["trackio", "tensorboard"]}),
        ("--use_peft", {"use_peft": True}),
        ("--use_peft --seed 3", {"use_peft": True, "seed": 3}),
        ("--use_peft off", {"use_peft": False}),
        ("--use_peft=no", {"use_peft": False}),
        ("--tf32", {"tf32": True}),
        ("--max_steps -1", {"max_steps": -1}),
        ("--missing-eos-penalty -.5", {"missing_eos_penalty": -0.5}),
        ("--stop_token null", {"stop_token": None}),
        ("--eval_strategy no", {"eval_strategy": "no"}),
        ("--run_name a:b", {"run_name": "a:b"}),
        ("--run_name=--x", {"run_name": "--x"}),
        ('--lr_scheduler_kwargs {"num_cycles":2}', {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        ("--accelerator_config acc.json", {"accelerator_config": "acc.json"}),
    ],
)
def test_flags(write, flags, values):
    assert load(write, "", *flags.split()) == {"method": "ppo", **values}


def test_a_flag_replaces_the_file_s_list(write):
    assert load(write, "reward_funcs: [a, b]", "--reward_funcs", "c")["reward_funcs"] == ["c"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--learning_rat 1", "learning_rat: unknown field; did you mean learning_rate?"),
        ("--zzz 1", "zzz: unknown field; 'trl-alpharl train --help-all' lists them"),
        ("--seed", "seed: found no value after the flag"),
        ("--reward_funcs", "reward_funcs: found no value after the flag"),
        ("--use_peft --use_peft false", "use_peft: found no value after the flag"),
        ("--seed 1 2", "seed: found 2 values (1 2), expected one"),
        ("--seed 1 --seed 2", "seed: found 2 values (1 2), expected one"),
        ("--use_peft maybe", "use_peft: found 'maybe', expected true or false"),
        ("--seed=", "seed: found nothing, expected a whole number"),
        ("--reward_funcs [a", "reward_funcs: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("--fsdp_config {a", "fsdp_config: not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("--batch_size 8", "batch_size: computed from other fields and cannot be set; leave it out"),
        ("seed 1", "found 'seed', expected a flag such as --seed 1"),
    ],
)
def test_a_wrong_flag_is_one_line(write, flags, message):
    with pytest.raises(RecipeError) as error:
        load(write, "", *flags.split())
    assert str(error.value) == f"command line: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nlearning_rat: 1", ":3: learning_rat: unknown field; did you mean learning_rate?"),
        ("seed: 1\nseed: 2", ":3: seed: given twice, first in line 2"),
        ("\n\ncritic: bogus", ":4: critic: found 'bogus', expected one of shared, adapter"),
        ("lora_r: 3.7", ":2: lora_r: found '3.7', expected a whole number"),
        ("temperature: [1, 2]", ":2: temperature: found a list, expected a number"),
        ("method: dpo", ":2: method: given twice, first in line 1"),
        ("reward_weights:\n  - 1\n  - x", ":4: reward_weights: found 'x', expected a number"),
        ("lr_scheduler_kwargs:\n  a: 1\n  a: 2", ":4: lr_scheduler_kwargs: a: given twice, first in line 3"),
        ("[a, b]: 1", ":2: found a list or a mapping as a name, expected text"),
        ("run_name: !!python/name:os.system x", ":2: not valid YAML: tags are not supported"),
        ("run_name: &n x", ":2: not valid YAML: anchors are not supported"),
        ("run_name: *n", ":2: not valid YAML: anchors are not supported"),
        ("run_name: 'x", ":3: not valid YAML: found unexpected end of stream"),
        ("a: b: c", ":2: not valid YAML: mapping values are not allowed here"),
        ("---\nseed: 1", ":2: not valid YAML: but found another document"),
        *(
            (f"{name}: 8", f":2: {name}: computed from other fields and cannot be set; leave it out")
            for name in COMPUTED
        ),
    ],
)
def test_a_wrong_line_is_named(write, text, message):
    path = write(f"method: ppo\n{text}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value) == path + message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1", ": method: missing, expected a line such as 'method: ppo'"),
        ("", ": found no fields, expected lines such as 'method: ppo'"),
        ("# only a comment", ": found no fields, expected lines such as 'method: ppo'"),
        ("- a", ": found no fields, expected lines such as 'method: ppo'"),
        ("method: ppo\nrun_name: \x00", ": not valid YAML: special characters are not allowed"),
    ],
)
def test_a_file_that_is_no_recipe(write, text, message):
    path = write(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value) == path + message


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"method: \xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read as UTF-8 text"):
        load_recipe(str(path))


def test_fields_of_arpo_need_its_method(write):
    path = write("method: ppo\nkl_stop: 0.01\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value) == f"{path}: kl_stop: only 'method: arpo' has this field"
    assert load_recipe(path, ["--method", "arpo"]).section("arpo") == {"kl_stop": 0.01}


def test_a_flag_does_not_stand_in_for_the_recipe_s_method(write):
    with pytest.raises(RecipeError, match="method: missing"):
        load_recipe(write("seed: 1"), ["--method", "ppo"])


@pytest.mark.parametrize(
    "name", ["quickstart/ppo_tiny", "recipes/quickstart/ppo_tiny", "recipes/quickstart/ppo_tiny.yaml"]
)
def test_a_shipped_recipe_is_found_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(name).name == "quickstart/ppo_tiny"


def test_a_file_in_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes/quickstart").mkdir(parents=True)
    (tmp_path / "recipes/quickstart/ppo_tiny.yaml").write_text("method: ppo\nseed: 9\n")
    recipe = load_recipe("recipes/quickstart/ppo_tiny.yaml")
    assert (recipe.values["seed"], recipe.name) == (9, "ppo_tiny")


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError) as error:
        find_recipe("quickstart/ppo_tinny")
    assert str(error.value) == (
        "quickstart/ppo_tinny: no such file or shipped recipe; did you mean quickstart/ppo_tiny?"
    )
    with pytest.raises(RecipeError, match="'trl-alpharl recipes' lists them"):
        find_recipe("zzz")


def test_a_data_file_beside_the_recipe_is_found(write, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(Path(__file__).parent)
    assert load(write, "dataset_name: rows.jsonl")["dataset_name"] == str(tmp_path / "rows.jsonl")
    assert load(write, "dataset_name: other.jsonl")["dataset_name"] == "other.jsonl"
    assert load(write, "dataset_name: rows.jsonl", "--dataset_name", "rows.jsonl")["dataset_name"] == "rows.jsonl"
    assert load(write, "dataset_name: none")["dataset_name"] is None


def test_an_uninstalled_checkout_finds_its_recipes(monkeypatch):
    monkeypatch.setattr(recipe_module, "find_spec", lambda name: None)
    assert "quickstart/ppo_tiny" in shipped_recipes()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_are_complete_and_introduce_themselves(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.path.read_text(encoding="utf-8").startswith("# ")
    for field in ("output_dir", "seed", "model_name_or_path", "dataset_name", "reward_funcs", "total_episodes"):
        assert recipe.values[field] is not None
    task, method = name.split("/")[0], recipe.values["method"]
    assert name.startswith(f"{task}/{method}_")


@pytest.mark.trl_compat
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_trl_s_parser_takes_shipped_recipes(name, tmp_path):
    from trl import ModelConfig, TrlParser

    from trl_alpharl import ARPOConfig, PPOConfig

    recipe = load_recipe(name)
    config_class = {"ppo": PPOConfig, "arpo": ARPOConfig}[recipe.values["method"]]
    ours = {**recipe.section("ppo"), **recipe.section("arpo")}
    given = {**ours, **recipe.section("model"), "output_dir": str(tmp_path), "use_cpu": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(given))
    args, model = TrlParser((config_class, ModelConfig)).parse_args_and_config(["--config", str(path)])
    for field in ours.keys() - {"output_dir"}:
        assert getattr(args, field) == given[field], field
    unwrapped = {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in recipe.section("model").items()}
    assert {field: getattr(model, field) for field in unwrapped} == unwrapped


def test_the_sentiment_prompts_are_distinct_questions():
    lines = (find_recipe("sentiment/ppo_smollm2-135m_lora").parent / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len({prompt[0]["content"] for prompt in prompts}) == len(prompts) == 200
    assert all([turn["role"] for turn in prompt] == ["user"] for prompt in prompts)
