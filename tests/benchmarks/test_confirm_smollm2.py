"""confirm_smollm2.py: what is still to run, the reward, the table; one tiny run of it is slow."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def confirm(benchmark):
    return benchmark("confirm_smollm2")


def done(arm, seed, final):
    rows = [
        {"episodes": 16 * at, "score": 0.4 if at < 2 else final, "kl": float(at), "entropy": 1.0} for at in range(6)
    ]
    return {"arm": arm, "seed": seed, "rows": rows}


class TestPlan:
    def test_four_points_first(self, confirm):
        missing = confirm.plan([])
        assert [(arm, seed) for arm, _, seed in missing] == [(arm, 0) for arm in confirm.POINTS]
        assert len({tuple(settings.items()) for _, settings, _ in missing}) == 4
        assert confirm.plan([done(missing[0][0], 0, 0.5)]) == missing[1:]

    def test_then_both_arms_at_the_best_point_on_fresh_seeds(self, confirm):
        runs = [done(arm, 0, 0.9 if at == 2 else 0.5) for at, arm in enumerate(confirm.POINTS)]
        missing = confirm.plan(runs)
        assert [seed for _, _, seed in missing] == [100, 100, 101, 101, 102, 102]
        best = list(confirm.POINTS.values())[2]
        assert all(best.items() <= settings.items() for _, settings, _ in missing)
        assert [settings["preset"] for _, settings, _ in missing] == ["ppo", "tuned"] * 3
        assert confirm.plan([*runs, *(done(arm, seed, 0.5) for arm, _, seed in missing)]) == []


def test_the_reward_is_0_or_1(confirm):
    pytest.importorskip("vaderSentiment")
    assert confirm.sounds_positive(["I love it, wonderful!", "It is a table.", "I hate this, it is awful."]) == [
        1,
        0,
        0,
    ]


def test_32_prompts_are_held_out(confirm):
    trained_on, held_out = (dataset["prompt"] for dataset in confirm.prompts())
    assert (len(trained_on), len(held_out)) == (168, 32)
    assert not any(prompt in trained_on for prompt in held_out)
    assert all(turns[0] == {"role": "system", "content": ""} for turns in [*trained_on, *held_out])


def test_the_table(confirm):
    runs = [done(arm, 0, 0.5) for arm in confirm.POINTS]
    runs += [done(arm, seed, final) for seed in (100, 101) for arm, final in (("best PPO", 0.6), (confirm.ARPO, 0.9))]
    shown = confirm.table(runs)
    row, _ = [line for line in shown.splitlines() if line.startswith(f"| {confirm.ARPO} |")]
    assert "0.900 [0.900, 0.900]" in row and "+50 % [+50, +50]" in row
    assert shown.count("seed 0: final 0.500, KL 3.5") == 4  # the last four of 0 .. 5


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["PPO", "TUNED"])
def test_an_arm_runs(confirm, arm, model, tokenizer, monkeypatch):
    template = "{% for message in messages %}w2 {{ message['content'] }} {% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(confirm, "TOP_LAYERS", 1)

    def reward(completions, **kwargs):  # 1 for all of the held-out prompts, for every other one of a rollout's
        return [float(len(completions) == confirm.HELD_OUT or at % 2) for at in range(len(completions))]

    monkeypatch.setattr(confirm, "sounds_positive", reward)
    settings = {**getattr(confirm, arm), "learning_rate": 1e-3, "kl_coef": 0.01}
    rows = confirm.run(model, tokenizer, settings, 0, rollouts=2)
    assert [row["episodes"] for row in rows] == [0, 16, 32]
    assert [row["score"] for row in rows] == [1, 1, 1]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5) and abs(rows[-1]["kl"]) > 0
