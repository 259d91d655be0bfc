"""Low-rank gradients in `PPOTrainer`: the switch, faults, resuming, the own loop, rollout boundaries, keys."""

import pytest
import torch

from trl_alpharl import PPOConfig
from trl_alpharl.lowrank.callback import LowRankGradientCallback
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.optimizer import LowRankAdamW
from trl_alpharl.lowrank.rank1 import Rank1Monitor
from trl_alpharl.metrics_table import METRICS, describe

SMALL = {"lowrank_rank": 8, "lowrank_update_gap": 4}
ON = {"lowrank": "optimizer", **SMALL}


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters() if p.requires_grad])


def logged(run):
    return [log for log in run.state.log_history if "loss" in log]


def test_the_optimizer_trains_clips_and_logs(trainer):
    run = trainer(**ON, critic_learning_rate=1e-2)
    before = weights(run)
    run.train()
    assert isinstance(run.low_rank_optimizer, LowRankAdamW) and not torch.equal(weights(run), before)
    assert min(log["grad_norm"] for log in logged(run)) > 0 and logged(run)[-1]["lowrank/rank"] == 8
    rates = {group["lr"] / run.optimizer.param_groups[0]["lr"] for group in run.optimizer.param_groups if group["lr"]}
    head = run.model.value_head.weight
    (own,) = [group for group in run.optimizer.param_groups if any(p is head for p in group["params"])]
    assert own["initial_lr"] == 1e-2 and len(rates) <= 2


def test_max_grad_norm_is_the_one_knob(trainer, model):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    moved = {}
    for limit in (1e-6, 1e6):
        model.load_state_dict(start)
        run = trainer(**ON, max_grad_norm=limit, adam_epsilon=1e-3)
        before = weights(run)
        run.train()
        moved[limit] = (weights(run) - before).norm()
    assert moved[1e-6] < 0.01 * moved[1e6]


def test_bases_are_renewed_in_the_last_step_of_a_rollout(trainer):
    run = trainer(**{**ON, "lowrank_update_gap": 1}, total_episodes=24, num_mini_batches=2)
    seen = []
    step = LowRankAdamW.step

    def count(optimizer, *args, **kwargs):
        done = step(optimizer, *args, **kwargs)
        seen.append(sum(state.get("refreshes", 0) for state in optimizer.state.values()))
        return done

    try:
        LowRankAdamW.step = count
        run.train()
    finally:
        LowRankAdamW.step = step
    matrices = len(run.low_rank_optimizer._matrices)
    renewed = [after - before for before, after in zip([0, *seen], seen)]
    assert renewed[0] == matrices  # the first basis
    assert [i + 1 for i, count in enumerate(renewed) if count and i] == [4, 8, 12]  # 4 steps a rollout


def test_a_gradient_that_is_not_finite_is_a_fault_like_any_other(trainer):
    run = trainer(**ON, total_episodes=8)
    calls = 0

    def spoil(gradient):
        nonlocal calls
        calls += 1
        return gradient * float("nan") if calls == 2 else gradient

    run.model.policy.lm_head.weight.register_hook(spoil)
    before = []
    step = run.training_step
    run.training_step = lambda *args: before.append(weights(run)) or step(*args)
    run.train()
    assert run.faults.skipped_steps == 1 and run.low_rank_optimizer.skipped_steps == 0
    assert torch.equal(before[0], before[1]) and not torch.equal(before[1], weights(run))
    assert weights(run).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4])
def test_resuming_also_inside_a_rollout_is_bit_equal(trainer, model, tmp_path, stop):
    """Cases 14 and 34."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = {"total_episodes": 24, "num_mini_batches": 2, "lr_scheduler_type": "constant", **ON}
    straight = trainer(**sizes)
    straight.train()
    model.load_state_dict(start)
    first = trainer(**sizes, save_strategy="steps", save_steps=stop, max_steps=stop)
    first.train()
    model.load_state_dict(start)
    resumed = trainer(**sizes)
    resumed.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-{stop}")
    assert torch.equal(weights(straight), weights(resumed))
    for mine, theirs in zip(straight.low_rank_optimizer._matrices, resumed.low_rank_optimizer._matrices):
        a, b = straight.low_rank_optimizer.state[mine], resumed.low_rank_optimizer.state[theirs]
        assert all(torch.equal(a[key], b[key]) for key in ("basis", "mean", "square", "mean_mass"))
    ends = [log["lowrank/energy"] for run in (straight, resumed) for log in logged(run) if log["step"] == 12]
    assert len(ends) == 2 and ends[0] == ends[1]


@pytest.mark.parametrize("values", [ON, {"lowrank": "callback", "lowrank_rank": 2}], ids=lambda v: v["lowrank"])
def test_a_loop_of_one_s_own_gives_the_same_weights(trainer, model, values):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(**values)
    run.train()
    model.load_state_dict(start)
    own = trainer(**values)
    for _ in range(own.args.num_total_batches):
        own.update(own.advantages(own.score(own.rollout())))
    assert torch.equal(weights(run), weights(own))


def test_both_tools_at_once_are_refused_in_both_loops(trainer):
    both = {**ON, "callbacks": [LowRankGradientCallback(LowRankConfig(rank=4))]}
    for start in (lambda run: run.train(), lambda run: run.update(run.advantages(run.score(run.rollout())))):
        with pytest.raises(ValueError, match=r"^LowRankGradientCallback and LowRankAdamW are both configured"):
            start(trainer(**both))


def test_every_key_is_logged_somewhere_and_described(trainer, model):
    monitor = Rank1Monitor(every=1, window=3, extrapolate=True, check=lambda model: 0.0, min_r2=-1.0)
    keys = set()
    for switch in ("optimizer", "callback"):
        callbacks = [monitor] if switch == "callback" else []
        extra = {"lowrank_update_gap": 4} if switch == "optimizer" else {}
        run = trainer(lowrank=switch, lowrank_rank=8, callbacks=callbacks, **extra)
        run.train()
        keys |= {key for log in run.state.log_history for key in log}
    assert [key for key in keys if describe(key) is None] == []
    described = {key for key in METRICS if key.startswith("lowrank/")}
    assert described - keys == {"lowrank/sent_bytes"}  # two processes: test_distributed.py


def test_lora_keeps_plain_adam_with_8_bit_moments_by_one_flag(trainer, lora):
    run = trainer(lowrank="optimizer", lowrank_rank=2, lowrank_plain_storage="8bit", peft_config=lora)
    run.train()
    optimizer = run.low_rank_optimizer
    assert not optimizer._matrices
    assert {state["mean_kind"] for state in optimizer.state.values()} == {"fp32"}  # factors below 4,096 elements


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lowrank_rank": 8}, "^lowrank_rank is set, but lowrank is 'none'"),
        ({"lowrank": "always"}, "^lowrank is 'always'; it must be one of 'none', 'callback', 'optimizer'"),
        ({"lowrank": "optimizer", "lowrank_rank": 0}, "^lowrank_rank is 0; it must be at least 1"),
        ({"lowrank": "callback", "lowrank_update": "scaled"}, "^update is 'scaled', which only the low-rank optimizer"),
    ],
)
def test_wrong_fields_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(output_dir="unused", use_cpu=True, report_to="none", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adamw_torch"}, "^optim is 'adamw_torch', but low_rank brings its own optimizer"),
        ({"fp16": True, "use_cpu": False}, "fp16"),
    ],
)
def test_what_does_not_go_with_the_optimizer(trainer, changes, message):
    with pytest.raises(ValueError, match=message):
        trainer(**ON, **changes)


def test_an_optimizer_of_the_script_s_is_refused(trainer, model):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^low_rank brings its own optimizer"):
        trainer(**ON, optimizers=(other, None))


def test_recipes_and_trl_s_parser_take_the_prefixed_keys(tmp_path):
    from trl_alpharl._trl import TrlParser
    from trl_alpharl.recipe import RecipeError, load_recipe

    flags = ["--lowrank", "optimizer", "--lowrank_rank_pattern", "paper", "--lowrank_refresh", "none"]
    values = load_recipe("quickstart/ppo_tiny", flags).section("ppo")
    assert values["lowrank_rank_pattern"] == "paper" and values["lowrank_refresh"] is None
    flags = ["--lowrank_rank_pattern", "{mlp: 8}", "--lowrank_rank", "4"]
    assert load_recipe("quickstart/ppo_tiny", flags).section("ppo")["lowrank_rank_pattern"] == {"mlp": 8}
    with pytest.raises(RecipeError, match=r"lowrank_side: found 'up', expected one of in, out, short, long"):
        load_recipe("quickstart/ppo_tiny", ["--lowrank_side", "up"])
    words = f"--output_dir {tmp_path} --use_cpu true --lowrank optimizer --lowrank_rank 4 --lowrank_side short".split()
    (args,) = TrlParser(PPOConfig).parse_args_and_config([*words, "--lowrank_rank_pattern", '{"mlp": 8}'])
    assert args.low_rank.rank_pattern == {"mlp": 8} and args.low_rank.side == "short"
