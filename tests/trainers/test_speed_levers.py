"""What makes a run faster changes nothing else: one rollout, each lever on and off, and what each lever does."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import fields

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import TrainerCallback

from trl_alpharl.knobs import PPOKnobs
from trl_alpharl.records import Rollout
from trl_alpharl.roles.cpu_attention import NAME
from trl_alpharl.rollout.prompts import pad_left
from trl_alpharl.rollout.scoring import gather_rows

LAYERS = 4  # of the model `deep`
LOWER = 2  # layers that do not learn
KINDS = {  # policy and critic; None: all of the model's upper half
    "shared": {"lora_top_layers": LAYERS - LOWER},
    "critic's adapter": {"lora_top_layers": LAYERS - LOWER, "critic": "adapter"},
    "full parameters": None,
}


@pytest.fixture
def start(trainer, deep, lora):
    """A factory of fresh trainers of one kind, all of whose learning weights have moved."""

    def make(kind: str, dtype: torch.dtype = torch.float32, **knobs):
        model = copy.deepcopy(deep).to(dtype)
        if KINDS[kind] is None:
            for part in (model.model.embed_tokens, *model.model.layers[:LOWER]):
                part.requires_grad_(False)
        else:
            knobs = {"peft_config": copy.deepcopy(lora), **KINDS[kind], **knobs}
        return moved(trainer(model=model, **knobs))

    return make


def moved(run):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return run


def ragged(run, index: int = 0) -> Rollout:
    """Answers of 1-3 and of 20-26 tokens to a trainer's prompts: chunks of two widths, and filler rows."""
    examples = [run.train_dataset[row] for row in run.local_rows(index)]
    prompts = run.tokenize_prompts(examples)
    generator = torch.Generator().manual_seed(index)
    lengths = torch.tensor([1 + row % 3 if row % 2 else 26 - row % 7 for row in range(len(prompts))])
    mask = torch.arange(26) < lengths[:, None]
    ids = torch.randint(2, 64, mask.shape, generator=generator) * mask
    return Rollout(index, *pad_left(prompts, 0), ids, mask, mask[:, 0], examples)


def first_step(run) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What the scoring pass and the first mini-batch's chunks say, and the gradients of the first step."""
    rollout, model = ragged(run), run._ready_for_own_loop()
    scored = run.score(rollout)
    numbers = [scored.old_per_token_logps, scored.ref_per_token_logps, scored.values, scored.entropies]
    policy_loss, value_loss, values = run.policy_loss, run.value_loss, []

    def noting_policy(stats, chunk, *rest):
        numbers.extend(part.detach()[chunk.completion_mask] for part in (stats.per_token_logps, stats.entropies))
        return policy_loss(stats, chunk, *rest)

    def noting_value(stats, chunk, *rest):
        values.append(stats.values.detach()[chunk.completion_mask])
        return value_loss(stats, chunk, *rest)

    run.policy_loss, run.value_loss = noting_policy, noting_value
    run.training_step(model, run.mini_batch(run.advantages(scored), 0))
    assert len(numbers) > 4 and not torch.equal(numbers[0], numbers[1])
    return numbers + values, {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


def assert_close(found, expected) -> None:
    (numbers, gradients), (others, other_gradients) = found, expected
    for one, other in zip(numbers, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == other_gradients.keys() and len(gradients) > 8
    for name, gradient in other_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3


OFF = {"cache_frozen_layers": False, "fuse_lora": False, "fuse_norms": False, "merge_lora_in_rollouts": False}
ON = dict.fromkeys(OFF, True)
WITHOUT_ADAPTERS = ("fuse_lora", "merge_lora_in_rollouts")


def levers(kind: str, values: dict) -> dict:
    """Those that the kind has."""
    return {name: value for name, value in values.items() if KINDS[kind] or name not in WITHOUT_ADAPTERS}


# Log-probs, values and gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_lever_alone_and_all_together_change_no_number(start, kind, checkpointing):
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_mini_batches": 2}
    shape["gradient_checkpointing"] = checkpointing
    plain = first_step(start(kind, **shape, **levers(kind, OFF)))
    on = levers(kind, ON)
    for changed in ({name: True} for name in on):
        assert_close(first_step(start(kind, **shape, **{**levers(kind, OFF), **changed})), plain)
    assert_close(first_step(start(kind, **shape, **on)), plain)
    other = start(kind, **shape, **levers(kind, OFF), temperature=0.9)  # so that this can fail
    with pytest.raises(AssertionError):
        assert_close(first_step(other), plain)


def test_a_critic_with_a_trunk_of_its_own_learns_the_same_in_a_pass_of_its_own(start, monkeypatch):
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_mini_batches": 2}
    assert start("shared", **shape).passes() == ("policy+value",)
    apart = start("critic's adapter", **shape)
    assert apart.passes() == ("policy", "value")
    together = start("critic's adapter", **shape)
    monkeypatch.setattr(together, "passes", lambda: ("policy+value",))
    assert_close(first_step(apart), first_step(together))
    found, expected = apart.metrics.flush(), together.metrics.flush()
    assert "loss/value_avg" in found and "loss/policy_avg" in found
    timeless = {name for name in expected if not name.startswith("time/")}
    assert {name: found[name] for name in timeless} == pytest.approx({name: expected[name] for name in timeless})


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_chunk_change_no_number(start, kind):
    """The scoring pass and the gradients; twelve rows in chunks of 4, of 1 and of 12, a few rows of each width."""
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, **levers(kind, ON)}
    found = []
    for budget in (None, 1e-6, 100.0):
        numbers, gradients = first_step(start(kind, memory_budget_gib=budget, **shape))
        found.append((numbers[:4], gradients, len(numbers)))
    assert len({count for _, _, count in found}) == 3  # as many chunks were trained
    for numbers, gradients, _ in found[1:]:
        assert_close((numbers, gradients), found[0][:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind, backend", [*((kind, "aot_eager") for kind in KINDS), ("shared", "inductor")])
def test_compiled_layers_beside_all_other_levers_change_no_number(start, kind, backend, monkeypatch):
    """aot_eager: the graphs alone, in seconds. inductor: with the kernels that training gets."""
    compile_with = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_with(self, backend=backend))
    torch._dynamo.reset()
    plain = first_step(start(kind, **levers(kind, OFF)))
    assert_close(first_step(start(kind, compile_layers=True, **levers(kind, ON))), plain)
    torch._dynamo.reset()


def test_a_checkpointed_model_is_not_compiled(trainer, deep):
    deep.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="compile_layers is on, but model is checkpointed"):
        trainer(model=deep, compile_layers=True)


@pytest.mark.parametrize(
    "kind, precision, more",
    [
        ("shared", "weights", None),
        ("shared", "autocast", "gradient_checkpointing"),
        ("critic's adapter", "weights", "gradient_checkpointing"),
        ("critic's adapter", "autocast", None),
        ("full parameters", "weights", "gradient_checkpointing"),
        ("full parameters", "autocast", None),
        pytest.param("shared", "weights", "compile_layers", marks=pytest.mark.slow),
    ],
)
def test_the_first_ratio_is_exactly_1_in_bf16_with_every_lever_on(start, kind, precision, more):
    """At learning rate 0, in every chunk of every PPO epoch (TRAPS A6); compiled by inductor, for several widths."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if precision == "weights" else torch.float32
    knobs = {"learning_rate": 0.0, "num_ppo_epochs": 3, "num_mini_batches": 2, "total_episodes": 12}
    knobs |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "bf16": precision == "autocast"}
    knobs |= {more: True} if more else {}
    run = start(kind, dtype, **levers(kind, ON), **knobs)
    assert run.model.config._attn_implementation == NAME
    run.explore = lambda prompts, examples, index: ragged(run, index)
    ratios, loss = [], run.policy_loss

    def noting(stats, chunk, experience, *rest):
        old = gather_rows(chunk, experience.scored.old_per_token_logps)
        ratio = (stats.per_token_logps.detach() - old).exp()
        ratios.append(float((ratio - 1).abs().masked_fill(~chunk.completion_mask, 0.0).max()))
        return loss(stats, chunk, experience, *rest)

    run.policy_loss = noting
    run.train()
    assert len(ratios) >= 3 * 2 * 2 and max(ratios) == 0.0


def test_a_run_with_every_lever_on_becomes_the_same_model(start):
    """Two rollouts of the policy's own samples, in fp32."""
    runs = [start("critic's adapter", **knobs) for knobs in (OFF, ON)]
    for run in runs:
        run.train()
    plain, fast = (run.state.log_history for run in runs)
    for one, other in zip(plain, fast, strict=True):
        for key in ("objective/kl", "objective/scores", "loss/value_avg", "policy/entropy_avg", "val/ratio"):
            assert one.get(key) == pytest.approx(other.get(key), abs=1e-4), key
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


# What is kept of the frozen layers


def lowest_runs(run) -> list[str]:
    """A list that gets an entry each time the lowest layer of the policy, or of its copy, runs."""
    seen: list[str] = []
    for name, model in (("policy", run.policy_model), ("copy", run.model.reference)):
        if model is not None:
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            inner.model.layers[0].register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_layers_run_once_a_rollout(start, kind):
    sizes = {"num_ppo_epochs": 3, "num_mini_batches": 2}
    for cached in (False, True):
        run = start(kind, cache_frozen_layers=cached, **sizes)
        rollout = run.rollout()
        plan, batches = run.plan(rollout)
        chunks = len(list(plan.chunks(rollout, range(8))))
        trained = sum(len(list(plan.chunks(rollout, rows))) for epoch in batches for rows in epoch)
        ran = lowest_runs(run)
        run.update(run.advantages(run.score(rollout)))
        if cached:
            assert ran == ["policy"] * chunks
        else:
            passes = 2 if kind == "critic's adapter" else 1  # of the policy's model, by policy and critic
            scoring = chunks * (1 + passes)  # and by the reference
            assert len(ran) == scoring + trained * passes
            assert ran.count("copy") == (chunks if kind == "full parameters" else 0)


class Kept(TrainerCallback):
    """Weak references to all that frozen layers gave, and which of it lives after each step and evaluation."""

    def __init__(self):
        self.given: list[weakref.ref] = []
        self.alive: dict[int, int] = {}
        self.evaluated: list[int] = []

    def watch(self, run):
        run_frozen = run.model.frozen_hidden

        def noting(chunk):
            hidden = run_frozen(chunk)
            self.given.append(weakref.ref(hidden.untyped_storage()))
            return hidden

        run.model.frozen_hidden = noting

    def count(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.given)

    def on_step_end(self, args, state, control, **kwargs):
        self.alive[state.global_step] = self.count()

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(self.count())


def test_what_was_kept_is_freed_with_its_rollout(start, dataset):
    kept = Kept()
    values = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": dataset.select(range(4))}
    run = start("shared", num_mini_batches=2, **values)  # four steps a rollout
    run.add_callback(kept)  # after the trainer's own
    kept.watch(run)
    run.train()
    assert sorted(kept.alive) == list(range(1, 9))
    assert all((kept.alive[step] == 0) == (step % 4 == 0) for step in kept.alive)
    assert len(kept.evaluated) == 4 and kept.evaluated[1] == kept.evaluated[3] == 0
    assert kept.evaluated[0] == kept.alive[2]  # an evaluation's own is gone when it is over


def test_what_is_kept_is_one_hidden_state_a_position(start):
    """And nothing of it is in a checkpoint's record of the rollout."""
    run = start("critic's adapter")
    rollout = run.rollout()
    plan = run.plan(rollout)[0]
    positions = sum(chunk.input_ids.numel() for chunk in plan.chunks(rollout, range(8)))
    experience = run.advantages(run.score(rollout))
    assert sorted(plan.kept) == list(range(8))
    storages = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in plan.kept.values()}
    assert sum(storages.values()) == positions * 64 * 4
    run.update(experience)
    assert len({row.untyped_storage().data_ptr() for row in plan.kept.values()}) == len(storages)


def noting_steps(run, seen: list):
    """`collect` that also puts the step it is called at into a list."""
    collect = run.collect
    return lambda step: seen.append(step) or collect(step)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_inside_a_rollout_is_bit_equal_with_the_cache_on(start, run_state, assert_same, tmp_path, kind):
    def run_of(folder, **changes):
        values = {"num_mini_batches": 2, "save_strategy": "steps", "save_steps": 1, **changes}
        return start(kind, output_dir=str(tmp_path / folder), cache_frozen_layers=True, **values)

    straight = run_of("straight")
    straight.train()
    expected = run_state(straight)
    for step in (1, 3):
        with safe_open(tmp_path / f"straight/checkpoint-{step}/rollout.safetensors", "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  not a dict
        assert shapes and all(len(shape) < 3 for shape in shapes)
        resumed = run_of(f"resumed-{step}", save_strategy="no")
        ran = lowest_runs(resumed)
        resumed.collect = noting_steps(resumed, ran)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"straight/checkpoint-{step}"))
        assert "policy" in ran[: ran.index(4)]  # made again, before the next rollout
        assert_same(run_state(resumed), expected, f"resumed at {step}")


# Every field does something


def adapted_layers(run) -> list[int]:
    names = [name for name, _ in run.policy_model.named_parameters() if ".default." in name]
    return sorted({int(name.split(".layers.")[1].split(".")[0]) for name in names if ".layers." in name})


def lora_layers(run) -> list[nn.Module]:
    return [module for module in run.policy_model.modules() if hasattr(module, "lora_A")]


def merged_in_rollouts(run) -> bool:
    seen = []
    generate = run.model.generate
    run.model.generate = lambda **kwargs: seen.append(lora_layers(run)[0].merged) or generate(**kwargs)
    run.rollout()
    return seen[0]


OBSERVED = {  # field -> values, and what is seen of them
    "lora_top_layers": ({None: [0, 1, 2, 3], 1: [3]}, adapted_layers),
    "cache_frozen_layers": (
        {None: True, True: True, False: False},
        lambda run: bool(run.score(run.rollout()) and run._plan[1].kept),
    ),
    "fuse_lora": (
        {True: "_LoraLinearBackward", False: "AddBackward0"},
        lambda run: type(lora_layers(run)[0](torch.zeros(1, 1, 64)).grad_fn).__name__,
    ),
    "fuse_norms": (
        {True: "_RMSNormBackward", False: "MulBackward0"},
        lambda run: (
            type(run.policy_model.get_base_model().model.norm(torch.zeros(1, 64, requires_grad=True)).grad_fn).__name__
        ),
    ),
    "merge_lora_in_rollouts": ({None: True, True: True, False: False}, merged_in_rollouts),
    "drop_finished_rows": ({True: True, False: False}, lambda run: run.sampling.drop_finished_rows),
    "compile_layers": (
        {True: True, False: False},
        lambda run: run.policy_model.get_base_model().model.layers[0]._compiled_call_impl is not None,
    ),
    "memory_budget_gib": ({None: 2, 1.0: 8, 1e-6: 1}, lambda run: run.plan(run.rollout())[0].rows),
}


def test_every_field_of_the_group_is_here():
    names = [knob.name for knob in fields(PPOKnobs)]
    first, last = names.index("ref_adapter_name") + 1, names.index("model_init_kwargs")
    assert set(OBSERVED) == set(names[first:last])


@pytest.mark.parametrize("name", OBSERVED)
def test_every_field_does_what_it_says(start, name):
    expected, look = OBSERVED[name]
    for value, seen in expected.items():
        assert look(start("shared", **{name: value})) == seen, value
