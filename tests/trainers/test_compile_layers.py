"""compile_layers: other kernels, the same algorithm; test_speed_levers.py has the numbers and the first ratio."""

import copy

import pytest
import torch

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


def test_graphs_are_bounded_when_widths_vary(trainer, lora, quick_backend):
    run = trainer(peft_config=lora, compile_layers=True, total_episodes=40)
    run.train()
    graphs = [log["time/compiled_graphs"] for log in run.state.log_history if "time/compiled_graphs" in log]
    assert graphs[-1] <= 8 and graphs[-1] == graphs[len(graphs) // 2]  # none after the widths have varied once
