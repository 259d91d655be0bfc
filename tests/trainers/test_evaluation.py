"""Evaluation by sampling: when it runs, what it logs, that it disturbs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from trl_alpharl.trainers.metrics import MetricSums

LOGGED = {
    "eval_objective/scores",
    "eval_objective/kl",
    "eval_objective/entropy",
    "eval_completions/mean_length",
    "eval_completions/finished",
    "eval_reward/count_word/mean",
    "eval_reward/count_word/std",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
}


def eval_logs(run, prefix="eval_"):
    return [entry for entry in run.state.log_history if any(name.startswith(prefix) for name in entry)]


def test_eval_strategy_steps(trainer, dataset):
    """CASES 25: TRL 1.12 never evaluated."""
    run = trainer(total_episodes=16, eval_strategy="steps", eval_steps=1, eval_dataset=dataset.select(range(5)))
    run.train()
    logs = eval_logs(run)
    assert [entry["step"] for entry in logs] == [1, 2, 3, 4]
    assert all(entry.keys() == LOGGED | {"epoch", "step"} for entry in logs)


def test_evaluate_directly(trainer, dataset):
    """CASES 25, before any training; the same numbers each time."""
    run = trainer(eval_dataset=dataset.select(range(5)))
    first = run.evaluate()
    again = run.evaluate()
    assert first.keys() >= LOGGED
    assert first["eval_objective/kl"] == 0.0
    for name in ("objective/scores", "objective/entropy", "completions/mean_length"):
        assert first[f"eval_{name}"] == again[f"eval_{name}"]


def test_means_are_those_of_the_rows(trainer, dataset):
    """Batches of 2 over 5 rows: the last one does not weigh more than its row."""
    run = trainer(eval_dataset=dataset.select(range(5)), per_device_eval_batch_size=2)
    run.sampling = replace(run.sampling, stop_ids=tuple(range(1, 30)))  # so that lengths differ
    scores, kinds, lengths, entropies, stopped = [], [], [], [], []
    for number, examples in enumerate(run.get_eval_dataloader()):
        scored = run._score_examples(examples, number, MetricSums())
        scores += scored.scores.tolist()
        mask = scored.rollout.completion_mask
        lengths += mask.sum(1).tolist()
        entropies += (-scored.old_per_token_logps * mask).sum(1).tolist()
        stopped += scored.rollout.finished.tolist()
        kinds.append(len(examples))
    assert kinds == [2, 2, 1] and len(set(lengths)) > 1
    logged = run.evaluate()
    assert logged["eval_objective/scores"] == pytest.approx(sum(scores) / 5)
    assert logged["eval_completions/mean_length"] == pytest.approx(sum(lengths) / 5)
    assert logged["eval_completions/finished"] == pytest.approx(sum(stopped) / 5)
    assert logged["eval_objective/entropy"] == pytest.approx(sum(entropies) / 5, rel=1e-6)
    assert logged["eval_reward/count_word/mean"] == pytest.approx(sum(scores) / 5)
    assert logged["eval_reward/count_word/std"] == pytest.approx(torch.tensor(scores).std(correction=0).item())


def test_several_evaluation_sets(trainer, dataset):
    sets = {"easy": dataset.select(range(3)), "held_out": dataset.select([9])}
    run = trainer(total_episodes=8, eval_strategy="steps", eval_steps=2, eval_dataset=sets)
    run.train()
    for name in sets:
        (entry,) = eval_logs(run, f"eval_{name}_")
        assert {f"eval_{name}_{key.removeprefix('eval_')}" for key in LOGGED} <= entry.keys()
    easy = run.evaluate(sets["easy"], metric_key_prefix="eval_again")
    assert easy["eval_again_objective/scores"] == eval_logs(run, "eval_easy_")[0]["eval_easy_objective/scores"]


def test_one_row(trainer, dataset):
    run = trainer(eval_dataset=dataset.select([0]))
    assert run.evaluate()["eval_completions/mean_length"] <= 6
    assert len(run.generate_completions()) == 1


def test_without_a_set(trainer):
    run = trainer()
    with pytest.raises(ValueError, match="evaluation needs an eval_dataset"):
        run.evaluate()
    assert run.generate_completions() == []


def test_training_metrics_are_not_flushed_by_an_evaluation_under_another_name(trainer, dataset):
    """A callback that evaluates on a test set, and one that logs something of its own."""
    run = trainer(total_episodes=8, logging_steps=2)

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                run.evaluate(dataset.select([1]), metric_key_prefix="test")
                run.log({"mine": 1.0})

    run.add_callback(Evaluates())
    run.train()
    tested, mine, trained, _ = run.state.log_history
    assert "test_objective/scores" in tested and "loss/policy_avg" not in tested
    assert "mine" in mine and "loss/policy_avg" not in mine
    assert {"objective/scores", "loss/policy_avg", "time/update_s"} <= trained.keys()


def test_rows_with_a_bad_reward_are_left_out_and_named(trainer, dataset, caplog):
    def bad(prompts, completions, **kwargs):
        return [float("nan"), *[2.0] * (len(completions) - 1)]

    run = trainer(eval_dataset=dataset.select(range(4)), reward_funcs=bad)
    assert run.evaluate()["eval_objective/scores"] == 2.0
    assert "reward 'bad' is not finite" in caplog.text
    assert run.faults.state_dict() == {"skipped_steps": 0, "in_a_row": 0}


# Tables


def test_generate_completions_returns_all_rows_and_prints_the_first(trainer, dataset, capsys):
    run = trainer(eval_dataset=dataset.select(range(7)), per_device_eval_batch_size=4)
    table = run.generate_completions()
    assert [row["query"] for row in table] == dataset["prompt"][:7]
    words = ("w5", "w6", "w7")
    assert [row["score"] for row in table] == [
        sum(word in words for word in row["model response"].split()) for row in table
    ]
    printed = capsys.readouterr().out
    assert dataset["prompt"][4] in printed and dataset["prompt"][5] not in printed  # five are shown
    assert len(run.generate_completions(sampling=True)) == 4  # one batch


@pytest.mark.parametrize(("asked", "after"), [(0, []), (1, [1]), (2, [1, 4]), (3, [1, 3, 5])])
def test_num_sample_generations(trainer, dataset, monkeypatch, asked, after):
    """Tables at equal distances over six rollouts."""
    run = trainer(
        total_episodes=48, num_ppo_epochs=1, num_sample_generations=asked, eval_dataset=dataset.select(range(2))
    )
    printed = []
    monkeypatch.setattr(run, "generate_completions", lambda sampling: printed.append(run.state.global_step))
    run.train()
    assert printed == after


def test_chat_turns_are_shown_one_a_line(trainer, dataset, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }} {% endfor %}")
    turns = [{"role": role, "content": word} for role, word in (("user", "w9"), ("assistant", "w8"), ("user", "w7"))]
    prompts = Dataset.from_dict({"prompt": [turns]})

    def reward(prompts, completions, **kwargs):
        return [float(len(completion[0]["content"].split())) for completion in completions]

    run = trainer(train_dataset=prompts, eval_dataset=prompts, reward_funcs=reward)
    (row,) = run.generate_completions()
    assert row["query"] == "user: w9\nassistant: w8\nuser: w7"
    assert row["model response"].startswith("assistant: ")


def test_score_dataset_is_silent(trainer, dataset, capsys):
    run = trainer()
    rows = run.score_dataset(dataset.select(range(3)))
    assert len(rows) == 3 and run.state.log_history == []
    assert capsys.readouterr().out == ""
