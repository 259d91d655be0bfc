"""lowrank_rl.py: what is still to run, and the table; one short run of it is slow."""

from __future__ import annotations

import pytest


@pytest.fixture
def rl(benchmark):
    return benchmark("lowrank_rl")


def test_both_tasks_have_their_reward(rl):
    assert {task: callable(rl.get_reward(name)) for task, name in rl.REWARDS.items()} == {"tiny": True, "smollm2": True}


def row(arm, rate, seed, score):
    return {
        "arm": arm,
        "rate": rate,
        "learning_rate": 3 * rate,
        "seed": seed,
        "score": score,
        "entropy": 1.0,
        "kl": 2.0,
        "gradient_and_state_bytes": 5_000_000,
        "step_s": 0.5 if arm == "adamw" else 1.0,
    }


def test_every_arm_gets_as_many_rates_and_seeds(rl):
    runs = rl.plan("tiny", rl.TINY_ARMS, [], short=False)
    assert len(runs) == len(set(runs)) == 3 * 3 * len(rl.TINY_ARMS)
    assert rl.plan("tiny", rl.TINY_ARMS, [row(*runs[0], 1.0)], short=False) == runs[1:]


def test_the_last_two_seeds_go_to_the_better_rate(rl):
    first = rl.plan("smollm2", ["adamw"], [], short=False)
    assert first == [("adamw", 1e-4, 0), ("adamw", 3e-4, 0)]
    done = [row("adamw", 1e-4, 0, 1.0), row("adamw", 3e-4, 0, 2.0)]
    assert rl.plan("smollm2", ["adamw"], done, short=False) == [("adamw", 3e-4, 1), ("adamw", 3e-4, 2)]


def test_the_table_shows_each_arm_at_its_best_rate(rl):
    rows = [row("adamw", 1e-4, seed, 1.0 + seed) for seed in range(3)]
    rows += [row("lowrank k=8", rate, seed, rate * 1e4) for rate in (1e-4, 3e-4) for seed in range(3)]
    first, second = rl.table(rows).splitlines()[2:]
    assert first.split("|")[1:5] == [" adamw ", " 3.0e-04 ", " 3 ", " 2.00 ± 1.00 "]
    assert second.split("|")[2:5] == [" 9.0e-04 ", " 3 ", " 3.00 ± 0.00 "] and second.endswith(" 2.00 |")


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["adamw", "lowrank k=16", "scaled k=8"])
def test_an_arm_runs(rl, arm):
    found = rl.run("tiny", None, arm, 3e-4, 0, short=True)
    assert found["gradient_and_state_bytes"] > 1e5 and len(found["curve"]) == 2
