"""TRL 1.12's own trainer as the oracle: one rollout of it, trained on by both; then what it does wrong, measured.

All of it needs TRL 1.12. Formula by formula, on every TRL: tests/functional/test_against_trl_1_12.py.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithPadding

from trl_alpharl.records import Rollout

ppo = pytest.importorskip("trl.experimental.ppo", exc_type=ImportError, reason="the oracle is TRL 1.12")
theirs = ppo.ppo_trainer
pytestmark = pytest.mark.trl_compat

PAD, EOS = 0, 1
ROWS, TOKENS = 8, 6
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_ppo_epochs": 3,
    "total_episodes": ROWS,
    "response_length": TOKENS,
    "stop_token": None,
    "vf_coef": 0.3,
    "gamma": 0.98,
    "lam": 0.9,
    "kl_coef": 0.2,
    "cliprange": 0.05,
    "cliprange_value": 0.05,
    "max_grad_norm": 0.0,  # 1.12 does not clip
    "num_sample_generations": 0,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
}


@dataclass
class Models:
    """Separate weights for every role, so that no role can stand in for another."""

    policy: nn.Module
    reference: nn.Module
    value: nn.Module
    reward: nn.Module

    def fresh(self):
        return copy.deepcopy(self)


@pytest.fixture
def models(model, classifier):
    """A policy that never says pad or eos: where 1.12 is right, every completion has full length."""
    model.lm_head = nn.Linear(64, 64)
    with torch.no_grad():
        model.lm_head.bias[[PAD, EOS]] = -50.0
    reference = copy.deepcopy(model)
    value, reward = copy.deepcopy(classifier), copy.deepcopy(classifier)
    generator = torch.Generator().manual_seed(5)
    for other in (reference, value):
        for parameter in other.parameters():
            parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    return Models(model, reference, value, reward)


@pytest.fixture
def left(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture
def run_theirs(tmp_path, left, dataset):
    """Makes 1.12's trainer, all of whose gradient steps are counted in `steps`."""

    def make(models, sgd=True, rows=64, rate=0.05, **changes):
        args = ppo.PPOConfig(
            **{"output_dir": str(tmp_path / "theirs"), "gradient_checkpointing": False, **SETTINGS, **changes}
        )
        data = dataset.select(range(rows)).map(
            lambda row: {"input_ids": left(row["prompt"])["input_ids"]}, remove_columns=["prompt"]
        )
        trainer = ppo.PPOTrainer(
            args,
            left,
            models.policy,
            models.reference,
            models.reward,
            data,
            models.value,
            data_collator=DataCollatorWithPadding(left),
            eval_dataset=data.select(range(4)),
            optimizers=optimizer_of(models, rate) if sgd else (None, None),
        )
        trainer.steps = []
        trainer.optimizer.optimizer.register_step_post_hook(lambda *_: trainer.steps.append(1))
        return trainer

    return make


def optimizer_of(models, rate):
    """Plain gradient descent: Adam would turn rounding errors in small gradients into steps of full size."""
    optimizer = torch.optim.SGD([*models.policy.parameters(), *models.value.parameters()], lr=rate)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class Recorder:
    """What passes through 1.12's module-level functions during one update."""

    def __init__(self, monkeypatch):
        self.calls = {}
        for name in ("batch_generation", "get_reward", "selective_log_softmax", "masked_whiten"):
            monkeypatch.setattr(theirs, name, self._recording(name, getattr(theirs, name)))

    def _recording(self, name, function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            kept = copy.deepcopy([x.detach() if torch.is_tensor(x) else x for x in args])
            self.calls.setdefault(name, []).append((kept, copy.deepcopy(detached(result))))
            return result

        return call

    def rollout(self, prompt_width):
        ids = self.calls["batch_generation"][0][1][0]
        prompts, answers = ids[:, :prompt_width], ids[:, prompt_width:]
        assert not torch.isin(answers, torch.tensor([PAD, EOS])).any() and answers.shape == (ROWS, TOKENS)
        everything = torch.ones_like(answers, dtype=torch.bool)
        finished = torch.zeros(ROWS, dtype=torch.bool)
        return Rollout(0, prompts, prompts != PAD, answers, everything, finished, [{"prompt": "w5"}] * ROWS)


def detached(result):
    return [x.detach() if torch.is_tensor(x) else x for x in result] if isinstance(result, tuple) else result.detach()


# ---- One rollout, two trainers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"kl_estimator": "k3", "whiten_rewards": True}])
def test_fed_with_1_12s_rollout_we_agree_on_every_number_and_every_weight(
    run_theirs, models, trainer, monkeypatch, changes
):
    ours_models, start = models.fresh(), models.policy.lm_head.weight.clone()
    record = Recorder(monkeypatch)
    old = run_theirs(models, **changes)
    old.train()
    assert len(old.steps) == 3
    queries = record.calls["batch_generation"][0][0][1]
    rollout = record.rollout(queries.shape[1])
    given = {tuple(ids): score for ids, score in zip(rollout.completion_ids.tolist(), their_scores(record).tolist())}

    ours = trainer(
        model=ours_models.policy,
        ref_model=ours_models.reference,
        value_model=ours_models.value,
        reward_funcs=lambda completion_ids, **kwargs: [given[tuple(ids)] for ids in completion_ids],
        optimizers=optimizer_of(ours_models, 0.05),
        **{**SETTINGS, **changes},
    )
    monkeypatch.setattr(ours, "explore", lambda prompts, examples, index: rollout)
    scored = ours.score(ours.rollout())
    close(scored.old_per_token_logps, record.calls["selective_log_softmax"][0][1])
    close(scored.ref_per_token_logps, record.calls["selective_log_softmax"][1][1])
    close(scored.values, their_values(record, queries.shape[1]))
    close(scored.scores, their_scores(record))
    assert (scored.old_per_token_logps - scored.ref_per_token_logps).abs().mean() > 0.1  # something to agree on

    experience = ours.advantages(scored)
    *whitened_rewards, (raw, advantages) = record.calls["masked_whiten"]
    close(experience.advantages, advantages)
    close(experience.returns, raw[0] + scored.values)
    if whitened_rewards:
        close(experience.token_rewards, whitened_rewards[0][1])
    ours._experience = None

    ours.metrics.flush()
    ours.train()
    logged = {}
    for entry in ours.state.log_history[:3]:
        for name, value in entry.items():
            logged.setdefault(name, []).append(value)
    expected = old.state.log_history[0]
    for name in [name for name in expected if name.startswith(("objective/", "policy/", "loss/", "val/"))]:
        if name != "val/ratio_var":  # theirs is over epochs, ours over the steps since the last log
            assert sum(logged[name]) / len(logged[name]) == pytest.approx(expected[name], abs=1e-5), name
    assert expected["policy/clipfrac_avg"] > 0 and expected["val/clipfrac_avg"] > 0

    for role in ("policy", "value"):
        mine, other = getattr(ours_models, role).state_dict(), getattr(models, role).state_dict()
        for name in other:
            close(mine[name], other[name], name)
    assert (models.policy.lm_head.weight - start).abs().max() > 1e-3


def their_scores(record):
    return record.calls["get_reward"][1][1][1]  # the first call asks the value model


def their_values(record, prompt_width):
    return record.calls["get_reward"][0][1][0][:, prompt_width - 1 : -1].squeeze(-1)


def close(found, expected, name=None):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=name and (lambda text: f"{name}: {text}"))


# ---- What 1.12 does wrong, and ours beside it ------------------------------------------------------------------------


def train_ours(trainer, models, **changes):
    run = trainer(
        model=models.policy,
        ref_model=models.reference,
        value_model=models.value,
        reward_model=models.reward,
        **{**SETTINGS, **changes},
    )
    run.train()
    return run


@pytest.mark.parametrize("mini_batches, right", [(1, 4), (2, 8), (4, 16)])
def test_it_steps_as_often_whatever_num_mini_batches_is(run_theirs, trainer, models, mini_batches, right):
    changes = {"num_mini_batches": mini_batches, "total_episodes": 2 * ROWS, "num_ppo_epochs": 2}
    ours = models.fresh()
    old = run_theirs(models, **changes)
    old.train()
    assert len(old.steps) == 4
    assert train_ours(trainer, ours, **changes).state.global_step == right


def test_it_never_clips(run_theirs, trainer, models):
    ours = models.fresh()
    before = copy.deepcopy(models.policy.lm_head.weight)
    run_theirs(models, max_grad_norm=1e-9).train()
    assert (models.policy.lm_head.weight - before).abs().max() > 1e-4
    run = train_ours(trainer, ours, max_grad_norm=1e-9, optimizers=optimizer_of(ours, 0.05))
    assert (ours.policy.lm_head.weight - before).abs().max() < 1e-6
    assert run.state.log_history[0]["grad_norm"] > 1e-3


def test_it_ignores_gradient_checkpointing(run_theirs, trainer, models):
    ours = models.fresh()
    old = run_theirs(models, gradient_checkpointing=True)
    old.train()
    assert not models.policy.is_gradient_checkpointing
    train_ours(trainer, ours, gradient_checkpointing=True)
    assert ours.policy.is_gradient_checkpointing and ours.value.is_gradient_checkpointing


def test_it_never_evaluates(run_theirs, trainer, models, dataset):
    ours = models.fresh()
    old = run_theirs(models, eval_strategy="steps", eval_steps=1)
    old.train()
    assert not any(name.startswith("eval_") for entry in old.state.log_history for name in entry)
    run = train_ours(trainer, ours, eval_strategy="steps", eval_steps=1, eval_dataset=dataset.select(range(4)))
    assert sum("eval_objective/scores" in entry for entry in run.state.log_history) == 3


def test_it_cannot_resume(run_theirs, models):
    with pytest.raises(TypeError, match="resume_from_checkpoint"):
        run_theirs(models).train(resume_from_checkpoint=True)


def test_it_ignores_max_steps(run_theirs, trainer, models):
    ours = models.fresh()
    old = run_theirs(models, max_steps=1, total_episodes=2 * ROWS)
    old.train()
    assert old.state.global_step == 2
    assert train_ours(trainer, ours, max_steps=1, total_episodes=2 * ROWS).state.global_step == 1


def test_its_checkpoint_lacks_the_critic(run_theirs, trainer, models, tmp_path):
    ours = models.fresh()
    old = run_theirs(models, save_strategy="steps", save_steps=1)
    old.train()
    (saved,) = (tmp_path / "theirs").glob("checkpoint-*")
    from safetensors.torch import load_file

    assert not any("score" in name for name in load_file(saved / "model.safetensors"))
    train_ours(trainer, ours, save_strategy="steps", save_steps=3)
    assert (tmp_path / "run" / "checkpoint-3" / "critic" / "model.safetensors").is_file()


def test_its_reference_of_a_trained_adapter_is_the_bare_model(run_theirs, trainer, models, lora):
    from peft import get_peft_model

    wrapped = get_peft_model(models.policy, lora)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    models.policy, models.reference = wrapped, None
    ours = models.fresh()
    old = run_theirs(models, sgd=False, learning_rate=0.0)
    old.train()
    assert abs(old.state.log_history[0]["objective/kl"]) > 1e-2
    assert train_ours(trainer, ours, learning_rate=0.0).state.log_history[0]["objective/kl"] == 0


def test_it_ignores_bf16(run_theirs, models):
    old = run_theirs(models, bf16=True)
    seen = []
    models.policy.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    old.train()
    assert set(seen) == {torch.float32}


def test_it_punishes_an_answer_that_the_users_stop_id_ended(run_theirs, trainer, models):
    with torch.no_grad():
        models.policy.lm_head.bias[7] = 50.0  # every answer is [7]
        models.reward.score.weight.zero_()
    ours = models.fresh()
    changes = {"stop_token_id": 7, "missing_eos_penalty": 1.0, "learning_rate": 0.0}
    old = run_theirs(models, sgd=False, **changes)
    old.train()
    assert old.state.log_history[0]["objective/scores"] == -1
    assert train_ours(trainer, ours, **changes).state.log_history[0]["objective/scores"] == 0


def test_it_fails_on_text_prompts_and_without_a_value_model(models, left, dataset, tmp_path):
    args = ppo.PPOConfig(output_dir=str(tmp_path), **SETTINGS)
    roles = (models.policy, models.reference, models.reward)
    with pytest.raises(AttributeError, match="base_model_prefix"):
        ppo.PPOTrainer(args, left, *roles, dataset, None)
    with pytest.raises((ValueError, KeyError)):
        ppo.PPOTrainer(args, left, *roles, dataset, models.value).train()


def test_at_learning_rate_0_both_say_ratio_1_and_kl_0(run_theirs, trainer, models):
    """What is right there and stays."""
    models.reference = copy.deepcopy(models.policy)
    ours = models.fresh()
    old = run_theirs(models, sgd=False, learning_rate=0.0)
    old.train()
    for log in (old.state.log_history[0], train_ours(trainer, ours, learning_rate=0.0).state.log_history[0]):
        assert log["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert abs(log["policy/approxkl_avg"]) < 1e-9
        assert abs(log["objective/kl"]) < 1e-4
        assert 3.5 < log["policy/entropy_avg"] < 4.2  # nats; log 64 at most, and no padding to drag it down
