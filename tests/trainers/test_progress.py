"""The progress line where the output is no terminal."""

from __future__ import annotations

from trl_alpharl.trainers.progress import RunProgress


def test_a_line_a_log_without_a_terminal(trainer, capsys):
    it = trainer(logging_steps=2)
    it.add_callback(RunProgress)
    it.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert all("score" in line and "KL" in line and "entropy" in line for line in lines)
