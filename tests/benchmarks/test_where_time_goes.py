"""where_time_goes.py: what is counted as the floor, what is counted as which kind, and the whole on a tiny model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from trl_alpharl.functional.frozen_head import LinearHead, frozen_head_logps_and_entropy


@pytest.fixture
def sizes(benchmark, model):
    return benchmark("speed.floor").Sizes.of(model.config, "float32", adapters=0, top_layers=None, critic="shared")


class TestFloor:
    def test_the_products_of_a_row_are_those_that_torch_counts(self, benchmark, model, sizes):
        ids = torch.randint(2, 64, (1, 12))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids)
        counted = counter.get_flop_counts()["Global"]
        products = sum(flops for op, flops in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
        costs = benchmark("speed.floor").phase_costs(sizes, [0], [12], ppo_epochs=1, micro_batch=1)
        attention = 2 * 4 * 64 * (12 * 13 / 2)  # layers x (scores and their sum, 2 FLOPs each) x width x pairs
        assert costs["rollout"].flops - attention == products

    def test_reference_and_update_are_further_passes(self, benchmark, sizes):
        one = benchmark("speed.floor").phase_costs(sizes, [4], [8], ppo_epochs=1, micro_batch=1)
        three = benchmark("speed.floor").phase_costs(sizes, [4], [8], ppo_epochs=3, micro_batch=1)
        assert one["score"].flops == 2 * one["rollout"].flops == one["update"].flops
        assert three["update"].flops == 3 * one["update"].flops and three["score"] == one["score"]

    def test_frozen_layers_run_once_a_rollout(self, benchmark, model):
        floor = benchmark("speed.floor")
        head = 2 * 64 * 64 * 8
        half = floor.Sizes.of(model.config, "float32", adapters=0, top_layers=1, critic="shared")
        costs = floor.phase_costs(half, [4], [8], ppo_epochs=1, micro_batch=1)
        layer = (costs["rollout"].flops - head) / 2
        assert costs["score"].flops == 3 * layer + 2 * head
        assert costs["update"].flops == 2 * layer + 2 * head

    def test_generation_reads_the_weights_once_a_token_and_the_cache_before_it(self, benchmark, sizes):
        cost = benchmark("speed.floor").phase_costs(sizes, [4, 4], [3, 1], ppo_epochs=1, micro_batch=2)["rollout"]
        weights = 4 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 64)
        cache = 2 * 2 * 64 * 4 * ((4 + 5 + 6) + 4)  # layers, keys and values, width, bytes, positions of both rows
        assert cost.bytes == 3 * weights + cache

    def test_the_slower_of_computing_and_moving_is_the_floor(self, benchmark):
        floor = benchmark("speed.floor")
        rates = floor.Rates(flops_per_s=10.0, bytes_per_s=2.0)
        assert rates.floor_s(floor.Cost(100.0, 2.0)) == 10 and rates.floor_s(floor.Cost(1.0, 8.0)) == 4

    def test_rates_are_numbers_of_this_machine(self, benchmark):
        rates = benchmark("speed.floor").measure_rates(64, 64, 128, torch.float32, "cpu")
        assert 1e7 < rates.flops_per_s < 1e16 and 1e7 < rates.bytes_per_s < 1e14


def event(name, shapes=(), parent=None, us=1.0):
    return SimpleNamespace(name=name, input_shapes=[list(s) for s in shapes], cpu_parent=parent, self_cpu_time_total=us)


class TestKinds:
    @pytest.mark.parametrize(
        ("name", "shapes", "kind"),
        [
            ("aten::mm", [(8, 64), (64, 128)], "matmul"),
            ("mkldnn::_linear_pointwise", [(8, 64), (128, 64)], "matmul"),
            ("bitsandbytes::dequantize_4bit", [(128, 1)], "matmul"),
            ("aten::_scaled_dot_product_flash_attention_for_cpu", [(1, 4, 8, 16)], "attention"),
            ("aten::mm", [(8, 64), (64, 96)], "head, log-probs, sampling"),
            ("aten::_log_softmax", [(8, 96)], "head, log-probs, sampling"),
            ("aten::embedding", [(96, 64), (8,)], "copies and indexing"),
            ("aten::copy_", [(8, 64)], "copies and indexing"),
            ("aten::mul", [(8, 64)], "elementwise and reductions"),
            ("graph_0_cpp_fused_add_mul_0", [], "compiled code"),
            ("Torch-Compiled Region: 0/0", [], "compiled code"),
            ("autograd::engine::evaluate_function: MmBackward0", [], "Python, dispatch, waiting"),
        ],
    )
    def test_of_an_operation(self, benchmark, name, shapes, kind):
        assert benchmark("speed.kinds").kind_of(event(name, shapes), 96) == kind

    def test_what_an_optimizer_calls_is_its(self, benchmark):
        step = event("Optimizer.step#AdamW.step")
        inner = event("aten::mul", parent=event("aten::_foreach_mul_", parent=step))
        assert benchmark("speed.kinds").kind_of(inner, 96) == "optimizer"

    def test_the_head_is_known_by_its_functions_where_it_works_on_blocks(self, benchmark):
        """By their names in the package: a rename shows here."""
        hidden, labels = torch.randn(8, 32, requires_grad=True), torch.arange(8)
        head = LinearHead(torch.randn(96, 32))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            logps, entropies = frozen_head_logps_and_entropy(hidden, labels, head, 0.7, max_block_elements=80)
            (logps.sum() + entropies.sum()).backward()
        found = benchmark("speed.kinds").seconds_by_kind(profiler.events(), 96, 0.0, "cpu")
        assert found["matmul"] == 0 < found["head, log-probs, sampling"]

    def test_shares_fill_the_wall_clock(self, benchmark):
        kinds = benchmark("speed.kinds")
        found = kinds.seconds_by_kind([event("aten::mm", us=2e6), event("step", us=5e6)], 96, 10.0, "cpu")
        assert found["matmul"] == 2 and found["Python, dispatch, waiting"] == 8 and sum(found.values()) == 10

    def test_a_real_profile_is_mostly_its_product(self, benchmark):
        left, right = torch.randn(512, 512), torch.randn(512, 512)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(5):
                (left @ right).relu()
        found = benchmark("speed.kinds").seconds_by_kind(profiler.events(), 96, 0.0, "cpu")
        assert found["matmul"] > found["elementwise and reductions"] > 0


@pytest.mark.slow
def test_the_whole_on_a_tiny_model(benchmark, tmp_path, capsys):
    out = tmp_path / "where.json"
    benchmark("where_time_goes").main(["--tiny", "--variant", "adapter", "--out", str(out)])
    found = json.loads(out.read_text())
    assert all(stage["seconds"] > stage["floor_s"] > 0 for stage in found["stages"].values())
    for kinds in found["kinds"].values():
        assert kinds["matmul"] > 0 and kinds["head, log-probs, sampling"] > 0
    assert found["kinds"]["update"]["optimizer"] > 0 == found["kinds"]["score"]["optimizer"]
    assert found["memory"]["optimizer state"] > 2 * found["memory"]["trained weights"] * 0.9
    assert "| rollout |" in capsys.readouterr().out
