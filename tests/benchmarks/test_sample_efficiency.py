"""The study: its tasks, its model with runs on a leading axis, its figures, and the quick form of the whole."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def study():
    """A function that imports a part of the study, which lies beside its script and not in the package."""
    sys.path.insert(0, str(BENCHMARKS))
    yield lambda name: importlib.import_module(name)
    sys.path.remove(str(BENCHMARKS))


class TestTasks:
    def test_prompts_of_a_task_have_one_length_and_known_ids(self, study):
        tasks = study("study.tasks")
        for make in tasks.TASKS.values():
            task = make()
            assert {len(prompt) for prompt in task.prompts} == {len(task.prompts[0])}
            assert all(2 <= token < tasks.VOCABULARY for prompt in task.prompts for token in prompt)
            completion = task.teach(task.prompts[0], torch.Generator().manual_seed(0))
            assert len(completion) <= task.answer_length and completion[-1] == tasks.EOS

    def test_sums(self, study):
        task = study("study.tasks").sparse()
        prompt = [2 + 7, 2 + 1, 12, 2 + 5, 2 + 2, 13]  # 17 + 25, the least digit first
        assert task.score(prompt, [2 + 2, 2 + 4, 2 + 0, 1]) == 1.0
        assert task.score(prompt, [2 + 2, 2 + 4, 1]) == task.score(prompt, [2 + 2, 2 + 4, 2 + 0]) == 0.0

    def test_the_unit_of_scaled_grows_and_its_score_does_not(self, study):
        task = study("study.tasks").scaled()
        pairs = [(prompt, [token, 1]) for prompt in task.prompts[:10] for token in range(2, 24)]
        early, late = ([task.rewards(p, c, when)[0] for p, c in pairs] for when in (0.0, 1.0))
        assert late == pytest.approx([100 * reward for reward in early])
        spoilt = sum(abs(reward - task.score(p, c)) > 1e-6 for reward, (p, c) in zip(early, pairs))
        assert 0.01 < spoilt / len(pairs) < 0.12

    def test_parts_and_order_by_hand(self, study):
        tasks = study("study.tasks")
        multi, long = tasks.multi(), tasks.long()
        assert multi.rewards([5, 6, 7, 8], [20, 20, 5, 3], 0.0) == [0.5, 75.0, 0.0025, 5.0]
        assert multi.score([5, 6, 7, 8], [20, 20, 5, 3]) == pytest.approx((0.5 + 0.75 + 0.25 + 0.5) / 4)
        assert long.score([2] * 4, [5, 6, 7, 3, 23, 2, 1]) == pytest.approx(3 / 39)  # 23 is followed by 2


class TestStacked:
    def test_each_run_is_the_plain_model(self, study):
        stacked = study("study.stacked")
        models = [stacked.new_model(seed) for seed in (0, 1)]
        decoder = stacked.StackedDecoder(models[0])
        weights = {
            n: torch.stack([dict(m.model.named_parameters())[n] for m in models])
            for n, _ in models[0].model.named_parameters()
        }
        ids = torch.randint(0, 24, (2, 3, 7), generator=torch.Generator().manual_seed(0))
        hidden = decoder(weights, ids)
        for run, model in enumerate(models):
            torch.testing.assert_close(hidden[run], model.model(ids[run]).last_hidden_state, atol=1e-5, rtol=1e-4)

    def test_the_optimizer_is_torch_s_with_a_clip_a_run(self, study):
        stacked = study("study.stacked")
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(2, 3, 4, generator=generator)
        ours = start.clone().requires_grad_()
        plain = [start[run].clone().requires_grad_() for run in (0, 1)]
        optimizer = stacked.StackedAdamW([{"w": ours}], 0.1, (0.9, 0.95), max_norm=1.0)
        torch_s = [torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0) for p in plain]
        for step in range(5):
            gradient = torch.randn(2, 3, 4, generator=generator) * torch.tensor([0.01, 5.0]).view(2, 1, 1)
            ours.grad = gradient.clone()
            optimizer.step([torch.tensor([True, step != 2])])
            for run in (0, 1):
                if run == 1 and step == 2:  # sits one out
                    continue
                plain[run].grad = gradient[run].clone()
                torch.nn.utils.clip_grad_norm_([plain[run]], 1.0)
                torch_s[run].step()
            torch.testing.assert_close(ours.detach(), torch.stack([p.detach() for p in plain]), atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def cell(study):
    """Runs a few rollouts of one configuration and gives the study object and its rows."""

    def run(rollouts=2, name="sparse", seeds=(0, 1), **changes):
        task = study("study.tasks").TASKS[name]()
        args = study("study.arms").config(task, rollouts, batch=8, **changes)
        it = study("study.loop").Study(task, args, study("study.stacked").new_model(), list(seeds), rollouts)
        return it, it.train()

    return run


class TestLoop:
    @pytest.mark.parametrize(
        "changes",
        [
            {"preset": "paper"},
            {"preset": "tuned", "reward_kind": "verifiable"},
            {
                "popart": True,
                "norm_noise": 0.01,
                "screening": 2,
                "positive_nll_coef": 0.1,
                "explained_variance_gate": True,
                "advantage_norm": "ema",
                "lam_length_scale": 0.5,
                "critic_warmup_steps": 4,
                "whiten_rewards": True,
                "entropy_control": "pi",
                "replay_ratio": 0.5,
            },
        ],
    )
    def test_every_mechanism_runs(self, cell, changes):
        _, rows = cell(name="dense", **changes)
        assert [(row["seed"], row["episodes"]) for row in rows] == [(s, e) for e in (0, 8, 16) for s in (0, 1)]
        assert all(np.isfinite([row["score"], row["kl"], row["entropy"]]).all() for row in rows)
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-5) and rows[-1]["kl"] != 0

    def test_a_warm_up_trains_the_critic_alone(self, cell):
        it, rows = cell(rollouts=1, critic_warmup_steps=100, name="dense")
        assert rows[-1]["kl"] == pytest.approx(0, abs=1e-6)
        assert it.critic["head.weight"].abs().sum() > 0

    def test_reward_weights_undo_the_units(self, study):
        tasks = study("study.tasks")
        task = tasks.multi()
        args = study("study.arms").config(
            task, 1, batch=8, **study("study.arms").MECHANISMS["multi"]["best PPO, true units"]
        )
        it = study("study.loop").Study(task, args, study("study.stacked").new_model(), [0], 1)
        batch = it._collect(0, 0.0)
        rows = zip(batch.ids[0].tolist(), batch.mask[0].sum(1).tolist())
        sums = [4 * task.score(ids[:4], ids[4:][:kept]) for ids, kept in rows]
        assert it._scores(it.runs[0], batch, 0, 0.0).tolist() == pytest.approx(sums)

    def test_only_an_arm_that_asks_for_the_shares_of_right_digits_sees_them(self, cell):
        def rewards(**changes):
            it, _ = cell(rollouts=1, **changes)
            return it, it._collect(0, 0.0)

        assert rewards()[1].rewards.shape == (2, 8, 1)
        it, batch = rewards(shaping_rewards=["digits"], shaping_coef=0.5)
        right, digits = batch.rewards.unbind(-1)
        kept = batch.mask[0].sum(1).tolist()
        for ids, count, share in zip(batch.ids[0].tolist(), kept, digits[0].tolist()):
            due = sum((token - 2) * 10 ** (at % 3) for at, token in enumerate(ids[:5]) if at != 2)  # two digits, +
            said = ids[6:][:count]
            hits = sum(due // 10**at % 10 + 2 == token for at, token in enumerate(said[:3]))
            assert share == pytest.approx(hits / 3)
        assert set(right.flatten().tolist()) <= {0.0, 1.0} and digits.max() > 0
        assert it._successes(batch.rewards).tolist() == (right > 0.5).tolist()
        it.runs[0].success.rate = 0.25
        expected = right[0] + 0.5 * 0.75 * digits[0]
        torch.testing.assert_close(it._scores(it.runs[0], batch, 0, 0.9), expected.float())
        it, batch = rewards(reward_weights=[1.0, 0.5])
        torch.testing.assert_close(
            it._scores(it.runs[0], batch, 0, 0.9), (batch.rewards[0] @ torch.tensor([1.0, 0.5]).double()).float()
        )
        it, batch = rewards(shaping_rewards=["digits"], shaping_schedule="linear")
        expected = batch.rewards[0, :, 0] + 0.25 * batch.rewards[0, :, 1]
        torch.testing.assert_close(it._scores(it.runs[0], batch, 0, 0.75), expected.float())

    def test_success_rates_are_each_run_s_own(self, cell, monkeypatch):
        it, _ = cell(rollouts=1, shaping_rewards=["digits"])
        monkeypatch.setattr(it, "_successes", lambda rewards: torch.arange(8) < 4)
        before = it.runs[0].success.rate
        it.rollout(1)
        assert it.runs[0].success.rate == pytest.approx(0.9 * before + 0.1 * 0.5)

    def test_the_gradient_at_the_head_s_input(self, cell):
        it, _ = cell(rollouts=1)
        ids = it._collect(0, 0.0).ids
        squares = torch.zeros(2)
        it._token_stats(it.policy, ids, squares)[0].square().sum().backward()
        hidden = it.decoder(it.policy, ids)[:, :, it.prompt_length - 1 : -1]
        logits = hidden @ it.policy["head.weight"].mT.unsqueeze(1)
        logps = logits.log_softmax(-1).gather(-1, ids[:, :, it.prompt_length :, None])
        (gradient,) = torch.autograd.grad(logps.square().sum(), hidden)
        torch.testing.assert_close(squares, gradient.square().sum((1, 2, 3)), rtol=1e-4, atol=1e-6)

    def test_a_surge_drops_the_step_of_policy_and_critic(self, cell, monkeypatch):
        it, _ = cell(rollouts=1, name="dense", reuse_surge=1.5)
        seen = []
        monkeypatch.setattr(it.runs[0].gate, "admit", lambda epoch, kl, norm: seen.append((epoch, norm)) or False)
        before = {
            name: weight.detach().clone() for name, weight in [*it.policy.items(), ("critic", it.critic["head.weight"])]
        }
        it.rollout(0)
        after = {**it.policy, "critic": it.critic["head.weight"]}
        for name, weight in before.items():
            assert weight[0].equal(after[name][0].detach())
        assert not before["head.weight"][1].equal(after["head.weight"][1].detach())
        assert [epoch for epoch, _ in seen] == [0, 1, 2, 3] and all(norm > 0 for _, norm in seen)

    def test_the_adaptive_coefficient_follows_the_kl(self, cell):
        it, _ = cell(name="dense", kl_target=15.0, kl_horizon=16, kl_coef=0.01)
        coefs = [run.kl.kl_coef for run in it.runs]  # two rollouts at a KL near 0: -.2 x 8 / 16 each
        assert coefs == pytest.approx([0.01 * 0.9**2] * 2)

    def test_150_cells(self, study):
        arms, tasks = study("study.arms"), study("study.tasks")
        cells = [
            len(arms.grid(task)) + len(arms.against(task, next(iter(arms.grid(task).values()))))
            for task in (make() for make in tasks.TASKS.values())
        ]
        assert sum(cells) <= 150 and set(arms.MECHANISMS) == set(tasks.TASKS)

    def test_every_arm_is_a_configuration(self, study):
        arms, tasks = study("study.arms"), study("study.tasks")
        for task in (make() for make in tasks.TASKS.values()):
            best = next(point for point in arms.grid(task).values() if point["kl_coef"])
            for settings in (*arms.grid(task).values(), *arms.against(task, best).values()):
                arms.config(task, 20, **settings)
        assert {point["kl_coef"] for point in arms.grid(tasks.long()).values()} == {0.0, 0.008}


class TestReport:
    curve = np.array([[64.0 * at, score, 0.1 * at] for at, score in enumerate([0, 0, 1, 2, 3, 4, 4, 4, 4])])

    def test_figures_by_hand(self, study):
        report = study("study.report")
        assert report.final_score(self.curve) == 4 and report.final_kl(self.curve) == pytest.approx(0.65)
        assert report.episodes_to(2.0, self.curve) == 64 * 4  # 1, 2, 3
        assert report.episodes_to(9.0, self.curve) == 64 * 8  # never: the budget
        flat = np.array([[at, 2.0 + 0.5 * at, 0.0] for at in range(40)])
        assert report.fluctuation(flat[:-2]) < 0.2  # a trend is none
        rough = flat.copy()
        rough[::2, 1] += 1
        assert report.fluctuation(rough) > 0.4

    def test_intervals(self, study):
        interval = study("study.report").interval
        center, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
        assert center == 3 and 1.5 < low < 2.5 and 3.5 < high < 4.5
        center, low, high = interval([2.0, 2.0, 2.0], [4.0, 4.0, 4.0])
        assert (center, low, high) == (-0.5, -0.5, -0.5)

    # KL, final score, episodes, fluctuation; the middle point is beaten by the first
    points = np.array([[1.0, 1.0, 800.0, 0.2], [2.0, 0.5, 100.0, 0.9], [3.0, 2.0, 400.0, 0.1]])

    def test_plain_ppo_at_a_kl(self, study):
        at_kl = study("study.report").at_kl
        assert at_kl(self.points, 0.5).tolist() == [1.0, 800.0, 0.2]
        assert at_kl(self.points, 2.0) == pytest.approx([1.5, 600.0, 0.15])
        assert at_kl(self.points, 9.0).tolist() == [2.0, 400.0, 0.1]

    def test_an_arm_at_its_kl(self, study):
        beyond = study("study.report").beyond
        runs = np.array([[1.0, 3.0], [1.5, 2.5], [400.0, 200.0], [0.4, 0.2]])
        differences, changes = beyond(self.points, runs)
        assert differences[0] == pytest.approx([0.5, 0.5, 0.5])  # either run and any mix of both
        assert changes[1] == pytest.approx([-0.5, -0.5, -0.5]) and changes[2] == pytest.approx([1.0, 1.0, 1.0])
        runs = np.array([[2.0, 2.0], [1.5, 2.5], [300.0, 300.0], [0.15, 0.45]])
        differences, changes = beyond(self.points, runs)
        assert differences[0] == pytest.approx([0.5, 0.0, 1.0])
        assert changes[0] == pytest.approx([1 / 3, 0.0, 2 / 3])
        assert changes[1] == pytest.approx([-0.5] * 3) and changes[2] == pytest.approx([1.0, 0.0, 2.0])

    def test_both_tables_by_hand(self, study):
        def curves(kl, level, jump, shake):
            rows = [[64.0 * at, level * (at >= jump) + shake * (-1) ** at, kl] for at in range(9)]
            return {seed: np.array(rows) for seed in (0, 1)}

        data = {
            ("dense", "PPO a"): curves(3.0, 2.0, 1, 0.03),  # at 128 episodes over .8 x .99 + .01
            ("dense", "best PPO"): curves(1.0, 1.0, 2, 0.01),  # at 256
            ("dense", "other"): curves(2.0, 3.0, 1, 0.01),
        }
        shown = study("study.report").task_table("dense", data).splitlines()
        assert shown[0] == "### dense: threshold 0.802, from 0.010"
        first, second = (line.split(" | ")[1:] for line in shown if line.startswith("| other |"))
        assert first[:4] == ["128 [128, 128]", "+50 % [+50, +50]", "3.000 [3.000, 3.000]", "+200 % [+200, +200]"]
        assert first[5:] == ["+0 % [+0, +0]", "2.0 [2.0, 2.0] |"]
        # plain PPO at a KL of 2: 1.5 after 192 episodes, twice as rough
        assert second[:3] == ["+33 % [+33, +33]", "+1.500 [+1.500, +1.500]", "+100 % [+100, +100]"]
        assert second[3] == "-50 % [-50, -50] |"

    def test_rows_come_back(self, study, tmp_path):
        report = study("study.report")
        rows = [{"seed": 3, "episodes": e, "score": e / 7, "kl": 0.5, "entropy": 1.0} for e in (0, 64)]
        for arm in ("best PPO", "replay .75, beta2 .95"):
            report.append_rows(tmp_path / "rows.csv", "dense", arm, rows)
        data = report.read_rows(tmp_path / "rows.csv")
        assert set(data) == {("dense", "best PPO"), ("dense", "replay .75, beta2 .95")}
        np.testing.assert_allclose(data["dense", "best PPO"][3], [[0, 0, 0.5], [64, 64 / 7, 0.5]], rtol=1e-5)


@pytest.mark.slow
def test_the_quick_form_goes_on_where_it_stopped(study, tmp_path, capsys):
    script = study("sample_efficiency")
    arguments = ["--quick", "--out", str(tmp_path)]
    script.main([*arguments, "--hours", "0"])
    assert "the same command goes on" in capsys.readouterr().out
    script.main(arguments)
    shown = capsys.readouterr().out
    assert shown.count("### ") == 2 and "| tuned |" in shown and "| paper |" in shown
    rows, packed = tmp_path / "quick/rows.csv", tmp_path / "quick/rows.csv.gz"
    assert (tmp_path / "quick/curves.png").stat().st_size > 5000
    kept, committed = rows.read_text(), packed.read_bytes()
    rows.unlink()  # as after a clone: only the packed rows are there
    script.main(arguments)
    assert rows.read_text() == kept and packed.read_bytes() == committed
