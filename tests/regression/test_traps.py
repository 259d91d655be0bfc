"""The measured traps A1-A7: each trains wrong without an error when its cure is taken away."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

from trl_alpharl import PPOTrainer
from trl_alpharl.records import Rollout
from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.adapters import adapter_parameters
from trl_alpharl.rollout.prompts import pad_left
from trl_alpharl.rollout.scoring import gather_rows

IDS = torch.tensor([[5, 9, 11, 30, 7, 2, 40, 0], [8, 3, 60, 21, 9, 33, 0, 0]])
TOKENS = {
    "input_ids": IDS,
    "attention_mask": (IDS > 0).long(),
    "position_ids": torch.arange(8).expand(2, 8),
    "predict_at": torch.tensor([[2, 3, 4], [1, 2, 3]]),
    "completion_ids": torch.tensor([[30, 7, 2], [60, 21, 9]]),
}


def adapted(model: nn.Module, **changes) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **changes))


def move(model: nn.Module, by: float = 0.05) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * by)
    return model


def gradients(roles: ActorCritic) -> dict[str, torch.Tensor]:
    """One backward through policy and critic together, the reference asked in between."""
    roles.zero_grad()
    stats = roles.train()(**TOKENS)
    with torch.no_grad(), roles.switch.using(roles.adapters["reference"]):
        roles.policy(input_ids=IDS)
    (stats.per_token_logps.sum() + stats.entropies.sum() + stats.values.sum()).backward()
    return {name: p.grad.clone() for name, p in roles.named_parameters() if p.grad is not None}


# A1


@pytest.mark.parametrize("switched_on", ["by the trainer", "before", "before, reentrant"])
def test_a1_roles_under_activation_checkpointing(model, switched_on):
    """Without the roles' own contexts a layer is recomputed with whatever adapter is active in the backward."""

    def build(model: nn.Module) -> ActorCritic:
        torch.manual_seed(5)
        return move(ActorCritic(adapted(model), critic="adapter"))

    expected = gradients(build(copy.deepcopy(model)))
    if switched_on != "by the trainer":  # in the user's script; QLoRA's preparation of a model does it, reentrant
        model.gradient_checkpointing_enable({"use_reentrant": switched_on == "before, reentrant"})
    roles = build(model)
    if switched_on == "by the trainer":
        roles.activation_checkpointing_enable()
    layer = roles.policy.get_base_model().model.layers[0]
    runs = []
    layer.mlp.register_forward_pre_hook(lambda *args: runs.append(roles.switch.current))
    found = gradients(roles)
    assert runs.count("default") == runs.count("critic") == 2  # each once more, in its own role
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-6, msg=name)
        assert gradient.abs().max() > 1e-4, name


def test_a1_the_heads_chunks_too(model):
    """Log-probs are recomputed in the backward, in the policy's role whatever role is active then."""
    roles = move(ActorCritic(get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))))
    found = []
    for role in ("default", None):
        roles.zero_grad()
        loss = roles(**TOKENS).per_token_logps.sum()
        with roles.switch.using(role):
            loss.backward()
        found.append({name: p.grad.clone() for name, p in roles.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and any("lm_head.lora_B" in name for name in found[0])
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


# A2


def test_a2_role_switches_leave_requires_grad_alone(trainer, lora):
    trainer = trainer(peft_config=lora, critic="adapter", total_episodes=16)
    roles = trainer.model
    before = {name: parameter.requires_grad for name, parameter in roles.named_parameters()}
    start = {name: parameter.detach().clone() for name, parameter in roles.named_parameters()}
    assert any(".critic." in name and learns for name, learns in before.items())
    for adapter in (None, "critic", "default", None):
        with roles.switch.using(adapter):
            pass
    roles.score(next(iter(_chunks(trainer))), 1.0)
    trainer.train()
    assert {name: parameter.requires_grad for name, parameter in roles.named_parameters()} == before
    moved = {name for name, p in roles.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {name for name, learns in before.items() if learns}


def test_a2_the_critics_adapter_gets_gradients_after_reference_passes(model):
    roles = move(ActorCritic(adapted(model), critic="adapter"))
    found = gradients(roles)
    for adapter in ("default", "critic"):
        for name, _ in adapter_parameters(roles.policy, adapter):
            assert found[f"policy.{name[:-1]}"].abs().sum() > 0, name


# A3


@pytest.fixture
def nf4(model, tmp_path):
    """A factory of the tiny policy with NF4 weights, loaded as transformers loads them."""
    model.save_pretrained(tmp_path / "nf4-base")

    def load(double_quant: bool = False) -> nn.Module:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=torch.float32,
        )
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "nf4-base", quantization_config=quantization, dtype=torch.float32
        )

    return load


def packed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Linear4bit)]


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_a3_nf4_gradients_survive_an_eval_forward(nf4, critic, double_quant):
    roles = move(ActorCritic(adapted(nf4(double_quant)), critic=critic))
    layers = packed(roles)
    assert len(layers) == 14 and not any(layer.support_avx512bf16_for_cpu for layer in layers)
    before = gradients(roles)
    weights = [layer.weight.data.clone() for layer in layers]
    with torch.no_grad():
        roles.eval()
        roles(**TOKENS)
        roles.generate(input_ids=IDS[:, :4], max_new_tokens=2, do_sample=False)
    after = gradients(roles)
    assert after.keys() == before.keys() and len(after) >= 9
    for name, gradient in before.items():
        assert torch.equal(after[name], gradient), name
        assert torch.cosine_similarity(after[name].flatten(), gradient.flatten(), 0) > 0.999
    assert all(torch.equal(layer.weight.data, weight) for layer, weight in zip(layers, weights))


def test_a3_every_role_is_cured(nf4, model, classifier):
    roles = ActorCritic(model, reference=nf4())
    assert packed(roles) and not any(layer.support_avx512bf16_for_cpu for layer in packed(roles))


def test_a3_weights_that_were_repacked_are_refused(nf4):
    model = nf4().eval()
    layers = packed(model)
    if not layers[0].support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16: bitsandbytes does not repack")
    with torch.no_grad():
        model(input_ids=IDS)
    with pytest.raises(ValueError, match="model has run in eval mode on this CPU, which repacked its 4-bit weights"):
        ActorCritic(adapted(model))


# A4


def test_a4_an_offloaded_model_is_refused(trainer, model, lora):
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="model has offloaded layers, which give adapters no gradients") as error:
        trainer(model=model, peft_config=lora)
    assert "\n" not in str(error.value)


# A5


def test_a5_the_optimizer_is_made_by_create_optimizer_alone():
    """An override of a combined hook is by-passed by newer releases; plain AdamW would train instead."""
    theirs = {name for name in vars(Trainer) if "optimizer" in name}
    ours = {name for cls in PPOTrainer.__mro__ if cls.__module__.startswith("trl_alpharl") for name in vars(cls)}
    assert "create_optimizer" in theirs
    assert ours & theirs == {"create_optimizer"}


@pytest.mark.parametrize("own_loop", [False, True])
def test_a5_the_optimizer_in_use_is_the_one_that_was_made(trainer, own_loop):
    trainer = trainer(critic_learning_rate=1e-2, learning_rate=1e-5, lr_scheduler_type="constant", optim="sgd")
    if own_loop:
        trainer.update(trainer.advantages(trainer.score(trainer.rollout())))
    else:
        trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's wrapper
    assert type(optimizer) is torch.optim.SGD
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(trainer.model.value_head.weight)] == 1e-2
    assert {rates[id(p)] for p in trainer.model.policy.parameters()} == {1e-5}


def test_a5_an_optimizer_that_was_passed_is_in_use(trainer, model):
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = trainer(optimizers=(own, None))
    trainer.train()
    assert getattr(trainer.optimizer, "optimizer", trainer.optimizer) is own
    assert any(p is trainer.model.value_head.weight for group in own.param_groups for p in group["params"])


# A6


def _chunks(trainer) -> list:
    rollout = trainer.rollout()
    return list(trainer.plan(rollout)[0].chunks(rollout, range(len(rollout.finished))))


class FirstRatios:
    """What a run at learning rate 0 scores and trains on: the largest |ratio - 1|, and the shapes a row runs in."""

    def __init__(self, trainer):
        self.worst: list[float] = []
        self.shapes: dict[tuple[int, int], set] = {}
        self._loss, self._score, self._trainer = trainer.policy_loss, trainer.model.score, trainer
        trainer.policy_loss, trainer.model.score = self.policy_loss, self.score
        trainer.train()

    def score(self, chunk, temperature):
        self.note(chunk, self._trainer.state.global_step // self._trainer.args.steps_per_rollout)
        return self._score(chunk, temperature)

    def policy_loss(self, stats, chunk, experience, tokens):
        self.note(chunk, experience.scored.rollout.index)
        old = gather_rows(chunk, experience.scored.old_per_token_logps)
        difference = (stats.per_token_logps.detach() - old).exp().sub(1).abs()
        self.worst.append(float(difference.masked_fill(~chunk.completion_mask, 0.0).max()))
        return self._loss(stats, chunk, experience, tokens)

    def note(self, chunk, rollout):
        kernel = "masked" if (chunk.attention_mask == 0).any() else "causal"
        for row in chunk.rows:
            self.shapes.setdefault((rollout, row), set()).add((chunk.input_ids.shape, chunk.predict_at.shape, kernel))


def short_and_long(trainer) -> None:
    """Make a trainer's rollouts answers of 1-3 and of 24-30 tokens: widths on both sides of a CPU kernel's block."""

    def explore(prompts, examples, index):
        generator = torch.Generator().manual_seed(index)
        lengths = [1 + row % 3 if row % 2 else 30 - row % 7 for row in range(len(prompts))]
        ids = torch.randint(2, 64, (len(prompts), 30), generator=generator)
        mask = torch.arange(30) < torch.tensor(lengths)[:, None]
        prompt_ids, prompt_mask = pad_left(prompts, 0)
        return Rollout(index, prompt_ids, prompt_mask, ids * mask, mask, mask[:, 0], examples)

    trainer.explore = explore


SHAPES = {
    "even": {},
    "odd": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_mini_batches": 4},
    "filler": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_mini_batches": 2},
    "one row": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_mini_batches": 2},
}
ROLES = {
    "full": {},
    "lora": {"peft": True},
    "critic": {"peft": True, "critic": "adapter"},
    "full, checkpointed": {"gradient_checkpointing": True},
    "critic, checkpointed": {"peft": True, "critic": "adapter", "gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    "role, shape, precision",
    [
        ("full", "even", "weights"),
        ("full", "odd", "autocast"),
        ("full", "filler", "weights"),
        ("full", "one row", "weights"),
        ("lora", "odd", "weights"),
        ("lora", "filler", "autocast"),
        ("critic", "filler", "weights"),
        ("critic", "even", "autocast"),
        ("full, checkpointed", "filler", "autocast"),
        ("full, checkpointed", "odd", "weights"),
        ("critic, checkpointed", "filler", "weights"),
        ("critic, checkpointed", "odd", "autocast"),
    ],
)
def test_a6_the_first_ratio_is_exactly_1_in_bf16(trainer, model, lora, role, shape, precision):
    """Scoring and training run a row in one shape and one kernel; between two shapes bf16 differs by 4 %.

    Not every difference of shape shows in the numbers of every CPU, so the shapes are compared as well.
    """
    knobs = {**ROLES[role], **SHAPES[shape], "learning_rate": 0.0, "bf16": precision == "autocast"}
    if knobs.pop("peft", False):
        knobs["peft_config"] = lora
    trainer = trainer(model=model if knobs["bf16"] else model.to(torch.bfloat16), total_episodes=8, **knobs)
    move(trainer.model)
    short_and_long(trainer)
    run = FirstRatios(trainer)
    assert len(run.shapes) == trainer.args.batch_size
    assert all(len(shapes) == 1 for shapes in run.shapes.values())
    assert max(run.worst) == 0.0
    assert (len({width for ((_, width), _, _) in set.union(*run.shapes.values())}) > 1) == (shape != "odd")


def test_case_4_in_fp32_too(trainer):
    assert max(FirstRatios(trainer(learning_rate=0.0)).worst) < 1e-5


# A7


def collected(trainer) -> list[tuple[int, int]]:
    """(step, rollout index) of every rollout that a run collects."""
    seen = []
    explore = trainer.explore

    def noting(prompts, examples, index):
        seen.append((trainer.state.global_step, index))
        return explore(prompts, examples, index)

    trainer.explore = noting
    return seen


@pytest.mark.parametrize("stop", [2, 3])
def test_a7_the_rollout_phase_follows_the_global_step(trainer, config, model, tmp_path, stop):
    """A counter of its own restarts at 0 on resume, and the run trains on the first prompts again."""
    knobs = {"total_episodes": 32, "num_ppo_epochs": 2, "save_strategy": "steps", "save_steps": stop}
    straight = trainer(model=copy.deepcopy(model), **knobs)
    expected = collected(straight)
    straight.train()
    assert expected == [(0, 0), (2, 1), (4, 2), (6, 3)]
    resumed = trainer(model=copy.deepcopy(model), **knobs)
    seen = collected(resumed)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-{stop}")
    assert seen == [pair for pair in expected if pair[0] >= stop]


def test_a7_the_own_loop_follows_it_too(trainer):
    trainer = trainer(total_episodes=24)
    seen = collected(trainer)
    for _ in range(3):
        trainer.update(trainer.advantages(trainer.score(trainer.rollout())))
    assert seen == [(0, 0), (2, 1), (4, 2)]
