"""vs_trl.py: the work, the clock, the processes and the figures; our side on a tiny model. TRL's side needs TRL 1.12,
so it runs where the oldest supported TRL is tested."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(benchmark):
    work = benchmark("speed.work")
    return work.Work(
        model="tiny",
        prompts=work.random_prompts("tiny", 4, 4, ragged=False),
        response_tokens=6,
        dtype="float32",
        updates=2,
        ppo_epochs=2,
        micro_batch=2,
        lora_rank=4,
        settings={"critic": "shared"},
    )


class TestWork:
    def test_it_travels_as_json(self, benchmark, tiny, tmp_path):
        tiny.write(tmp_path / "work.json")
        assert benchmark("speed.work").Work.read(tmp_path / "work.json") == tiny

    def test_prompts_are_random_tokens_of_the_model(self, benchmark):
        work = benchmark("speed.work")
        prompts = work.random_prompts("7b", 50, 16, ragged=False)
        assert {len(prompt) for prompt in prompts} == {16}
        assert min(map(min, prompts)) >= 100 and 30_000 < max(map(max, prompts)) < 32_000
        assert prompts == work.random_prompts("7b", 50, 16, ragged=False)
        lengths = {len(prompt) for prompt in work.random_prompts("7b", 200, 16, ragged=True)}
        assert (min(lengths), max(lengths)) == (4, 28)

    def test_tokens_count_up_to_the_first_stop(self, benchmark):
        count = benchmark("speed.work").count_tokens
        rows = [[5, 9, 7, 9], [1, 2, 3, 4]]
        assert [count(rows, stop) for stop in (None, 9, 8, 1)] == [8, 2 + 4, 8, 4 + 1]

    def test_the_ending_token_halves_the_answers(self, benchmark):
        # As a stop token 3 leaves 8 of 8 tokens, 5 leaves 1 + 4, 6 leaves 2 + 2.
        assert benchmark("speed.work").ending_token([[5, 6, 1, 1], [2, 6, 2, 3]]) == 6

    def test_every_switch_is_a_field_with_another_default(self, benchmark):
        work = benchmark("speed.work")
        config = benchmark("trl_alpharl.knobs").PPOKnobs()
        for change in work.SWITCHES.values():
            for name, value in change.items():
                assert getattr(config, name) != value

    def test_only_the_top_layers_get_adapters_on_trl_s_side(self, benchmark, tiny):
        lora = benchmark("speed.models").lora_config
        half = replace(tiny, lora_top_layers=1)
        assert lora(half, by_layers=True).layers_to_transform == [1]
        assert lora(half, by_layers=False).layers_to_transform is None  # ours has a field for it


class TestClock:
    @pytest.fixture
    def clock(self, benchmark, monkeypatch):
        module = benchmark("speed.clock")
        now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0, 36.0])
        monkeypatch.setattr(module.PhaseClock, "_now", lambda self: (next(now),) * 2)
        return module.PhaseClock("cpu")

    def test_every_second_belongs_to_a_phase_of_an_update(self, clock):
        for _ in range(2):
            for phase in ("rollout", "score", "update"):
                clock.enter(phase)
            clock.tokens = 7
            clock.end_update()
        first, second = (update["seconds"] for update in clock.updates)
        assert first == {"rest": 1, "rollout": 2, "score": 3, "update": 4}
        assert second == {"rest": 5, "rollout": 6, "score": 7, "update": 8}
        assert [update["tokens"] for update in clock.updates] == [7, 7]

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks cannot be reset")
    def test_a_peak_is_that_of_its_phase(self, benchmark):
        clock = benchmark("speed.clock").PhaseClock("cpu")
        clock.enter("rollout")
        held = torch.ones(2**26)
        clock.enter("score")
        del held
        clock.enter("update")  # what was freed is still part of this phase's start
        clock.enter("rest")
        clock.end_update()
        peaks = clock.updates[0]["peak_bytes"]
        assert peaks["rollout"] - peaks["update"] > 2**27


class TestOurSide:
    def test_an_update_has_its_phases_and_its_tokens(self, benchmark, tiny, tmp_path):
        trainer = benchmark("speed.run_ours").build(tiny, tmp_path)
        trainer.train()
        assert [update["tokens"] for update in trainer.clock.updates] == [24, 24]
        assert all(update["seconds"][phase] > 0 for update in trainer.clock.updates for phase in update["seconds"])
        assert trainer.args.temperature == benchmark("speed.work").TEMPERATURE

    def test_the_reward_is_the_last_token_modulo_seven(self, benchmark):
        assert benchmark("speed.run_ours").last_token_reward(completion_ids=[[1, 9], [16]]) == [2.0, 2.0]

    def test_supervised_steps_lower_the_cross_entropy_of_the_policy_alone(self, benchmark, tiny, tmp_path):
        ours = benchmark("speed.run_ours")
        trainer = ours.build(replace(tiny, updates=1, ppo_epochs=8), tmp_path, ours.SupervisedTrainer)
        trainer.args.learning_rate = 1e-2
        experience = trainer.advantages(trainer.score(trainer.rollout(0)))
        rollout = experience.scored.rollout
        assert trainer.clock.tokens == 24 and not rollout.finished.any()

        def cross_entropy():
            ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], 1)
            with torch.no_grad():
                logits = trainer.policy_model(ids).logits[:, 3:-1]
            return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rollout.completion_ids.flatten()))

        before = cross_entropy()
        logged = trainer.update(experience)
        assert cross_entropy() < before
        assert logged["loss/policy_avg"] == pytest.approx(before, rel=0.1)
        assert not trainer.model.value_head.weight.any()


class TestProcesses:
    def test_the_order_is_a_b_b_a(self, benchmark):
        assert benchmark("speed.processes").interleaved("A", "B", 3) == list("ABBAAB")

    @pytest.fixture
    def sides(self, benchmark, tmp_path):
        """Sides whose TRL interpreter is a shell script."""

        def make(script):
            program = tmp_path / "python"
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            return benchmark("speed.processes").Sides(trl_python=str(program))

        return make

    def test_a_result_comes_back(self, sides, tiny):
        result = sides('echo "{\\"core\\": \\"$OMP_NUM_THREADS\\", \\"words\\": \\"$1 $2\\"}" > "$4"').run("trl", tiny)
        assert result["side"] == "trl" and result["words"] == "-m speed.run_trl"

    def test_what_does_not_fit_is_a_result(self, sides, tiny):
        failed = sides("echo torch.OutOfMemoryError: CUDA out of memory. >&2; exit 1").run("trl", tiny)
        assert failed == {"side": "trl", "failed": "out of memory"}
        assert sides("exec sleep 60").run("trl", tiny, timeout=0.2)["failed"] == "not done in time"

    def test_any_other_failure_ends_it_in_one_line(self, sides, tiny):
        with pytest.raises(SystemExit, match=r"^trl failed: ValueError: wrong$"):
            sides("echo Traceback >&2; echo ValueError: wrong >&2; exit 1").run("trl", tiny)

    def test_a_machine_has_a_description(self, benchmark):
        assert benchmark("speed.processes").describe_machine(3)["pinned_to_core"] == 3


def result(side, seconds, tokens=24, peak=2**30):
    """A result of two updates, the first of them slow and large as a warm-up may be."""
    phases = ("rollout", "score", "update", "rest")

    def update(s, bytes_):
        return {
            "tokens": tokens,
            "seconds": dict.fromkeys(phases, s / 4),
            "cpu_seconds": dict.fromkeys(phases, s / 8),
            "peak_bytes": dict.fromkeys(phases, bytes_),
        }

    return {"side": side, "updates": [update(99.0, peak), update(seconds, peak / 2)], "versions": {}, "card": None}


class TestReport:
    def test_the_warm_up_counts_for_memory_alone(self, benchmark, tiny):
        found = benchmark("speed.report").figures(result("ours", 2.0), tiny)
        assert found["tokens_per_s"] == 12 and found["tokens_per_cpu_s"] == 24 and found["updates"] == 1
        assert found["peak_bytes"] == 2**30 and found["mean_response_tokens"] == 6

    def test_another_number_of_tokens_is_not_the_same_work(self, benchmark, tiny):
        report = benchmark("speed.report")
        with pytest.raises(SystemExit, match="24 response tokens"):
            report.figures(result("ours", 2.0, tokens=23), tiny)
        report.figures(result("ours", 2.0, tokens=23), replace(tiny, stop_token_id=5))

    def test_a_ratio_is_taken_inside_a_pair(self, benchmark, tiny):
        report = benchmark("speed.report")
        results = [result("trl", 10.0), result("ours", 2.0, peak=2**29), result("ours", 4.0), result("trl", 12.0)]
        runs = [report.figures(one, tiny) for one in results]
        found = report.ratios(runs, "trl", "ours")
        assert found == {"tokens_per_s": [5, 3], "tokens_per_cpu_s": [5, 3], "peak_bytes": [0.5, 1]}
        assert report.ratio_lines(found, cpu=False)[0].endswith("4.00 (3.00 to 5.00), 2 pairs of runs")
        row = report.runs_table(runs, {"trl": "TRL 1.12"}).splitlines()[2]
        assert row.startswith("| TRL 1.12 | 2 x 1 | 2.75 | 2.75 | 2.75 | 2.75 | 2.2 (2.0 to 2.4) | 1.00")

    def test_a_failed_side_has_a_row_and_no_ratio(self, benchmark, tiny):
        report = benchmark("speed.report")
        runs = [
            report.figures({"side": "trl", "failed": "out of memory"}, tiny),
            report.figures(result("ours", 2.0), tiny),
        ]
        assert report.ratios(runs, "trl", "ours")["tokens_per_s"] == []
        table = report.runs_table(runs, {}).splitlines()
        assert table[2].startswith("| trl | out of memory |") and len({line.count("|") for line in table}) == 1

    def test_an_ablation_is_over_the_mean_of_the_defaults(self, benchmark, tiny):
        report = benchmark("speed.report")
        runs = [report.figures(result(*one), tiny) for one in (("default", 2.0), ("off", 4.0), ("default", 6.0))]
        lines = report.ablation_table(runs).splitlines()
        assert lines[2] == "| none (2 runs) | 8.0 | 1.00 (0.50 to 1.50) | 1.00 | 1.00 |"
        assert lines[3] == "| off | 6.0 | 0.75 | 1.00 | 1.00 |"

    def test_scaling_is_over_the_mean_of_once(self, benchmark, tiny):
        report = benchmark("speed.report")
        results = [result("once", 2.0), result("8 x prompts", 16.0, tokens=192, peak=2**31), result("once", 6.0)]
        runs = [{**report.figures(one, replace(tiny, stop_token_id=5)), "side": one["side"]} for one in results]
        row = "| 8 x prompts | 4.00 | 4.00 | 4.00 | 16.00 | 4.00 | 2.00 | 2.00 |"
        assert report.scaling_table(runs).splitlines()[3] == row


def test_the_page_s_commands_parse(benchmark):
    page = (ROOT / "docs/performance.md").read_text()
    commands = re.findall(r"^python benchmarks/vs_trl\.py (.*)$", page, re.MULTILINE)
    assert len(commands) >= 4
    for words in commands:
        benchmark("vs_trl").parse_flags(shlex.split(words))


@pytest.mark.parametrize(
    "variant, field, other",
    [
        ("ragged", "drop_finished_rows", "cache_frozen_layers"),
        ("top-half", "cache_frozen_layers", "drop_finished_rows"),
    ],
)
def test_an_ablation_leaves_out_what_has_no_effect(benchmark, variant, field, other):
    class Noting:
        works = []

        def run(self, side, work):
            self.works.append((side, work))
            return {"stop_token_id": 5} if side == "ending" else result(side, 2.0)

    options = benchmark("vs_trl").parse_flags(["--tiny", "--ablation"])
    changes = [run.get("change") for run in benchmark("vs_trl").ablation(options, Noting(), variant)["runs"]]
    assert {field: False} in changes and {other: False} not in changes and changes[0] == changes[-1] == {}
    assert all((work.stop_token_id == 5) == (variant == "ragged") for side, work in Noting.works if side == "ours")


def test_a_micro_batch_must_divide_the_rollout(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark("vs_trl").parse_flags(["--rows", "16", "--micro_batch", "5"])
    assert "--micro_batch 5 does not divide --rows 16" in capsys.readouterr().err


@pytest.mark.slow
def test_our_side_alone(benchmark, tmp_path, capsys):
    out = tmp_path / "found.json"
    words = ["--tiny", "--sides", "ours", "--variant", "ragged", "--out", str(out), "--lora_rank", "2"]
    benchmark("vs_trl").main(words)
    found = json.loads(out.read_text())
    (compared,) = found["results"]
    assert compared["work"]["stop_token_id"] is not None and len(compared["runs"]) == 1
    assert compared["ratios"]["tokens_per_s"] == []
    assert found["command"][-3:] == ["found.json", "--lora_rank", "2"]  # without this machine's folders
    assert "LoRA of rank 2 on all layers" in capsys.readouterr().out


@pytest.mark.slow
def test_supervised_peak(benchmark, capsys):
    benchmark("vs_trl").main(["--tiny", "--sft"])
    assert re.search(r"PPO over cross-entropy: [01]\.\d\d", capsys.readouterr().out)


@pytest.mark.slow
def test_scaling(benchmark, tmp_path):
    out = tmp_path / "found.json"
    benchmark("vs_trl").main(["--tiny", "--scaling", "--out", str(out)])
    (found,) = json.loads(out.read_text())["results"]
    assert [run["side"] for run in found["runs"]] == ["once", "8 x prompts", "8 x response tokens", "once"]
    assert [run["mean_response_tokens"] for run in found["runs"]] == [6, 6, 48, 6]
    per_update = [run["tokens_per_s"] * sum(run["phase_s"].values()) for run in found["runs"]]
    assert per_update == pytest.approx([24, 192, 192, 24])


@pytest.mark.slow
@pytest.mark.trl_compat
@pytest.mark.skipif(not version("trl").startswith("1.12."), reason="TRL 1.12's trainer is what is measured")
def test_both_sides(benchmark, tmp_path):
    out = tmp_path / "found.json"
    words = ["--tiny", "--trl_python", sys.executable, "--out", str(out)]
    benchmark("vs_trl").main(words)
    (compared,) = json.loads(out.read_text())["results"]
    assert [run["side"] for run in compared["runs"]] == ["trl", "ours"]
    assert all(run["phase_s"][phase] > 0 for run in compared["runs"] for phase in ("rollout", "score", "update"))
    assert len(compared["ratios"]["tokens_per_s"]) == 1


class TestGPUScript:
    def test_it_is_a_script(self):
        assert subprocess.run(["bash", "-n", str(ROOT / "benchmarks/gpu.sh")]).returncode == 0

    def test_no_run_starts_without_time(self, benchmark, monkeypatch):
        bench = benchmark("gpu_bench")
        runs = bench.run_all(bench.Sides(), ["ours"], "cpu", end=0.0)
        assert [run["failed"] for run in runs] == ["no time left"] * 2

    @pytest.mark.slow
    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the full shape")
    def test_it_runs_without_a_gpu(self, tmp_path):
        out = tmp_path / "gpu.json"
        command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--sides", "ours", "--out", str(out)]
        environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found = json.loads(out.read_text())
        assert [run["dtype"] for run in found["runs"]] == ["bfloat16", "nf4"]
        assert all(run["tokens_per_s"] > 0 for run in found["runs"])
        assert "| ours, nf4 |" in done.stdout
