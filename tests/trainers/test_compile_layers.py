"""compile_layers: other kernels, the same algorithm."""

import copy

import pytest
import torch
from datasets import Dataset

from trl_alpharl.rollout.scoring import gather_rows

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_backend(monkeypatch):
    """Graphs as they are captured, run by torch's own operations: seconds instead of minutes."""
    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_with(self, backend="aot_eager"))


def grad_norms(run):
    run.train()
    return [log["grad_norm"] for log in run.state.log_history if "grad_norm" in log]


def test_gradients_are_those_of_the_plain_run(trainer, model, lora, quick_backend):
    plain, compiled = (
        trainer(model=copy.deepcopy(model), peft_config=lora, critic="adapter", compile_layers=on, total_episodes=8)
        for on in (False, True)
    )
    wanted, found = grad_norms(plain), grad_norms(compiled)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert compiled.state.log_history[0]["time/compiled_graphs"] > 0
    assert "time/compiled_graphs" not in plain.state.log_history[0]


def worst_ratios(run):
    """The largest |ratio - 1| of each chunk of a run."""
    loss, worst = run.policy_loss, []

    def watched(stats, chunk, experience, tokens):
        old = gather_rows(chunk, experience.scored.old_per_token_logps)
        moved = (stats.per_token_logps.detach() - old).exp().sub(1).abs()
        worst.append(float(moved.masked_fill(~chunk.completion_mask, 0.0).max()))
        return loss(stats, chunk, experience, tokens)

    run.policy_loss = watched
    run.train()
    return worst


def test_graphs_are_bounded_when_widths_vary(trainer, lora, quick_backend):
    run = trainer(peft_config=lora, compile_layers=True, total_episodes=40)
    run.train()
    graphs = [log["time/compiled_graphs"] for log in run.state.log_history if "time/compiled_graphs" in log]
    assert graphs[-1] <= 8 and graphs[-1] == graphs[len(graphs) // 2]  # none after the widths have varied once


def test_the_first_ratio_is_exactly_1_in_bf16(trainer, model, lora):
    """With the kernels that training gets: two graphs, so one length of rows."""
    equal = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 8})
    run = trainer(
        model=model.bfloat16(),
        peft_config=lora,
        train_dataset=equal,
        compile_layers=True,
        stop_token=None,
        learning_rate=0.0,
        total_episodes=8,
    )
    worst = worst_ratios(run)
    assert len(worst) == 8 and max(worst) == 0.0
