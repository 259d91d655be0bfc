"""`class LowRankTrainer(LowRankMixin, Trainer)`: clipping, logs, resuming, and what is refused."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from trl_alpharl.lowrank.callback import LowRankGradientCallback
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.mixin import LowRankMixin
from trl_alpharl.lowrank.optimizer import LowRankAdamW

CONFIG = LowRankConfig(rank=8, update_gap=2)


class LowRankTrainer(LowRankMixin, Trainer):
    pass


class Rows(torch.utils.data.Dataset):
    """32 rows of 8 tokens."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = torch.randint(2, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def run(model, tmp_path):
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def make(low_rank=CONFIG, fresh=True, train=True, resume=None, **changes):
        if fresh:
            model.load_state_dict(start)
        values = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "learning_rate": 1e-3,
        }
        rest = {name: changes.pop(name) for name in ("optimizers", "callbacks") if name in changes}
        args = TrainingArguments(**{**values, **changes})
        trainer = LowRankTrainer(model, args, train_dataset=Rows(), low_rank=low_rank, **rest)
        if train:
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    make.start = start
    return make


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def logged(trainer, key):
    return [log[key] for log in trainer.state.log_history if "loss" in log]


def test_the_optimizer_in_use_is_ours_and_statistics_are_logged(run):
    trainer = run()
    assert isinstance(trainer.low_rank_optimizer, LowRankAdamW)
    assert logged(trainer, "lowrank/rank") == [8.0] * 4
    assert logged(trainer, "lowrank/energy")[0] < 0.2 < logged(trainer, "lowrank/energy")[1] < 1
    assert logged(trainer, "lowrank/skipped_steps") == [0] * 4 and logged(trainer, "lowrank/state_bytes")[0] > 0


def test_max_grad_norm_is_the_one_knob(run, model):
    """Case 35."""
    ends = {}
    for limit in (1e-6, 1e6, 0):
        trainer = run(max_grad_norm=limit, adam_epsilon=1e-3)
        ends[limit] = weights(model)
        assert min(logged(trainer, "grad_norm")) > 0.1
    start = torch.cat([run.start[name].flatten() for name, _ in model.named_parameters()])
    assert (ends[1e-6] - start).norm() < 0.01 * (ends[1e6] - start).norm()
    assert torch.equal(ends[0], ends[1e6])


def test_the_logged_norm_is_that_of_the_plain_trainer(run, model):
    ours = run(max_steps=1)
    theirs = run(low_rank=None, max_steps=1)
    assert logged(ours, "grad_norm")[0] == pytest.approx(logged(theirs, "grad_norm")[0], rel=1e-4)
    assert isinstance(theirs.optimizer.optimizer, torch.optim.AdamW)


def test_accumulation_4_x_2_equals_1_x_8(run, model):
    """Case 33, in a Trainer. The clip is out of reach: the norm of several micro-batches is an estimate."""
    ends = []
    exact = LowRankConfig(rank=8, update_gap=2, basis_storage="fp32", moment_storage="fp32")
    for size, accumulation in ((8, 1), (2, 4)):
        run(exact, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_grad_norm=1e9)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_resuming_across_a_refresh_is_bit_equal(run, model):
    """Case 34."""
    run(max_steps=6, lr_scheduler_type="constant")
    straight = weights(model)
    run(max_steps=6, save_strategy="steps", save_steps=3, lr_scheduler_type="constant")
    folder = run(max_steps=6, train=False).args.output_dir + "/checkpoint-3"
    trainer = run(max_steps=6, resume=folder, lr_scheduler_type="constant")
    assert torch.equal(weights(model), straight)
    assert trainer.low_rank_optimizer.param_groups[0]["step"] == 6


def test_a_batch_whose_loss_is_not_finite_is_skipped_and_the_run_goes_on(run, model):
    calls = 0

    def spoil(gradient):
        nonlocal calls
        calls += 1
        return gradient * float("nan") if calls == 2 else gradient

    handle = model.lm_head.weight.register_hook(spoil)
    trainer = run(logging_nan_inf_filter=False)
    handle.remove()
    assert logged(trainer, "lowrank/skipped_steps") == [0, 1, 1, 1]
    assert weights(model).isfinite().all()


def test_what_cannot_work_together_is_refused(run, model):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^low_rank brings its own optimizer"):
        run(optimizers=(other, None), train=False)
    with pytest.raises(ValueError, match=r"^LowRankGradientCallback and LowRankAdamW are both configured"):
        run(callbacks=[LowRankGradientCallback(LowRankConfig(rank=4))])
    with pytest.raises(ValueError, match=r"^low-rank gradients do not work with fp16"):
        trainer = run(train=False)
        trainer.args.fp16 = True
        LowRankTrainer(model, trainer.args, train_dataset=Rows(), low_rank=CONFIG)


def test_an_optimizer_that_by_passes_ours_is_noticed(run):
    """Trap A5: a newer transformers may create the optimizer elsewhere."""
    trainer = run(train=False)
    trainer.create_optimizer = lambda *args: setattr(
        trainer, "optimizer", torch.optim.AdamW(trainer.model.parameters())
    )
    with pytest.raises(RuntimeError, match=r"^low_rank is set, but the trainer uses AdamW"):
        trainer.train()


def test_a_model_goes_on_under_another_optimizer_after_training(run, model):
    first = run()
    before = weights(model)
    second = run(low_rank=None, fresh=False, max_steps=1)
    assert (weights(model) != before).float().mean() > 0.9
    del second
    again = weights(model)
    first.train()  # the first trainer's optimizer takes gradients again
    assert not torch.equal(weights(model), again)
    assert first.low_rank_optimizer.param_groups[0]["step"] == 8


def test_gradients_that_stay_are_clipped_by_the_trainer_itself(run, model):
    kept = LowRankConfig(rank=8, accumulate_in_subspace=False)
    trainer = run(kept, max_steps=2)
    assert min(logged(trainer, "grad_norm")) > 0.1
    scaled = run(LowRankConfig(rank=2, update="scaled", refresh="random"), max_steps=2)
    assert logged(scaled, "loss")[-1] < logged(scaled, "loss")[0] + 1
