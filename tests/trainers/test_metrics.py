"""What a run logs: every key described, every described key logged, and the numbers right."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import DataCollatorWithPadding

from trl_alpharl import PPOTrainer
from trl_alpharl.metrics_table import METRICS, describe, is_reproducible
from trl_alpharl.records import Rollout
from trl_alpharl.trainers.metrics import MetricSums


def logged(run):
    """What training logged, without what evaluations did."""
    return [entry for entry in run.state.log_history if "loss" in entry]


def reproducible(entry):
    return {key: value for key, value in entry.items() if is_reproducible(key)}


# The table


def length(prompts, completions, **kwargs):
    return [float(len(text.split())) for text in completions]


def test_every_logged_key_is_described_and_every_described_key_is_logged(trainer, dataset, lora):
    run = trainer(
        total_episodes=16,
        num_mini_batches=2,
        peft_config=lora,
        critic="adapter",
        kl_target=1.0,
        missing_eos_penalty=1.0,
        reward_funcs=[length, lambda prompts, completions, **kwargs: [1.0] * len(completions)],
        eval_strategy="steps",
        eval_steps=4,
        eval_dataset={"held_out": dataset.select(range(2)), "two": dataset.select(range(2))},
    )
    run.train()
    keys = {key for entry in run.state.log_history for key in entry}
    assert [key for key in keys if describe(key) is None] == []
    found = [describe(key) for key in keys]
    elsewhere = (
        "arpo/",
        "lowrank/",
        "objective/engine_",
        "time/compiled_",
    )  # test_arpo_trainer.py, lowrank/test_in_ppo.py, test_engine.py
    own = {key: metric for key, metric in METRICS.items() if not key.startswith(elsewhere)}
    assert [key for key, metric in own.items() if not any(metric is entry for entry in found)] == []
    run.eval_dataset = dataset.select(range(2))
    assert [key for key in run.evaluate() if describe(key) is None] == []


@pytest.mark.parametrize("key", ["loss/policy", "reward/mean", "eval_held_out_", "objective", ""])
def test_other_keys_are_not_described(key):
    assert describe(key) is None


def test_the_clock_and_the_running_loss_are_not_reproducible():
    for key in ("loss", "eps", "time/update_s", "memory/peak_bytes", "train_loss", "eval_two_runtime"):
        assert not is_reproducible(key), key
    for key in ("loss/policy_avg", "episode", "grad_norm", "learning_rate", "eval_objective/scores", "epoch", "step"):
        assert is_reproducible(key), key


# Steps


@pytest.mark.parametrize(("num_mini_batches", "steps"), [(1, 4), (2, 8), (4, 16)])
def test_num_mini_batches_counts_optimizer_steps_and_scales_no_metric(trainer, model, num_mini_batches, steps):
    """CASES 1. At learning rate 0 and with answers of one length all splits average to the same."""

    def run_with(number):
        run = trainer(
            model=copy.deepcopy(model),
            num_mini_batches=number,
            learning_rate=0.0,
            stop_token=None,
            logging_steps=2 * number,
        )
        taken = []
        run.create_optimizer()
        step = run.optimizer.step
        run.optimizer.step = lambda *args, **kwargs: (taken.append(1), step(*args, **kwargs))[1]
        run.train()
        return len(taken), run

    taken, run = run_with(num_mini_batches)
    assert taken == run.state.global_step == run.state.max_steps == steps
    _, whole = run_with(1)
    entries, expected = logged(run), logged(whole)
    assert len(entries) == len(expected) == 2  # two rollouts of 8
    for entry, reference in zip(entries, expected):
        for key in set(reproducible(reference)) - {"step", "grad_norm"}:
            assert entry[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-6), key


def test_max_steps_one(trainer):
    """CASES 24: TRL 1.12 took two updates."""
    run = trainer(max_steps=1)
    run.train()
    assert run.state.global_step == 1 and [entry["step"] for entry in logged(run)] == [1]
    assert {int(state["step"]) for state in run.optimizer.state.values()} == {1}


def test_grad_norm_is_logged_before_clipping_and_each_step_clips_once(trainer, model):
    """CASES 5."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def run_with(**changes):
        run = trainer(model=copy.deepcopy(model), learning_rate=3e-6, **changes)
        clips = []
        clip = run.accelerator.clip_grad_norm_
        run.accelerator.clip_grad_norm_ = lambda *args: (clips.append(args[1]), clip(*args))[1]
        run.train()
        moved = max((tensor - start[name]).abs().max() for name, tensor in run.policy_model.state_dict().items())
        return run, clips, moved

    clipped, clips, moved = run_with(max_grad_norm=1e-9)
    assert clips == [1e-9] * 4 and moved < 1e-6
    free, _, moved_freely = run_with(max_grad_norm=1e6)
    assert moved_freely > 5e-6
    first, reference = logged(clipped)[0]["grad_norm"], logged(free)[0]["grad_norm"]
    assert first == reference > 0.1


def test_the_loss_that_is_logged_is_the_loss_that_is_minimised(trainer):
    run = trainer(total_episodes=8, vf_coef=0.3)
    run.train()
    for entry in logged(run):
        assert entry["loss"] == pytest.approx(entry["loss/policy_avg"] + 0.3 * entry["loss/value_avg"], abs=1e-6)


# Padding


@pytest.mark.parametrize("collated", [False, True])
def test_both_padding_sides_log_the_same(trainer, model, classifier, tokenizer, dataset, collated):
    """CASES 9, with a reward model and, for a TRL 1.12 script, a collator that pads."""

    def run_with(side):
        padded = copy.deepcopy(tokenizer)
        padded.padding_side = side
        rows = dataset.map(lambda row: tokenizer(row["prompt"]), remove_columns="prompt") if collated else dataset
        run = trainer(
            model=copy.deepcopy(model),
            processing_class=padded,
            reward_model=classifier,
            train_dataset=rows,
            data_collator=DataCollatorWithPadding(padded) if collated else None,
        )
        run.train()
        return [reproducible(entry) for entry in logged(run)]

    assert run_with("left") == run_with("right")


LENGTHS = (1, 6, 1, 6, 6, 6, 1, 6)


class HandMade(PPOTrainer):
    """A trainer whose answers are given: lengths 1 and 6, in `columns` columns."""

    columns = 6

    def explore(self, prompts, examples, index):
        sampled = super().explore(prompts, examples, index)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 64, (8, 6), generator=generator)
        mask = torch.arange(self.columns) < torch.tensor(LENGTHS).unsqueeze(1)
        ids = torch.nn.functional.pad(ids, (0, self.columns - 6)).masked_fill(~mask, 0)
        finished = torch.tensor(LENGTHS) == 1
        return Rollout(index, sampled.prompt_ids, sampled.prompt_mask, ids, mask, finished, examples)


def test_short_answers_and_unused_columns(trainer, config, model, tokenizer, dataset):
    """CASES 26: TRL 1.12 averaged over padding, so max_new_tokens changed its metrics."""

    def run_with(columns):
        run = HandMade(
            config(total_episodes=16, response_length=columns),
            tokenizer,
            copy.deepcopy(model),
            train_dataset=dataset,
            reward_funcs=length,
        )
        run.columns = columns
        run.train()
        return run

    run = run_with(6)
    entries = [reproducible(entry) for entry in logged(run)]
    for entry, wide in zip(entries, logged(run_with(12)), strict=True):
        assert entry == pytest.approx(reproducible(wide), rel=1e-5, abs=1e-7)  # sums of other widths round otherwise
    first = entries[0]
    assert first["completions/mean_length"] == sum(LENGTHS) / 8 and first["val/num_eos_tokens"] == 3
    assert first["completions/finished"] == 3 / 8

    untrained = HandMade(config(), tokenizer, copy.deepcopy(model), train_dataset=dataset, reward_funcs=length)
    rollout = untrained.rollout(0)
    sampled, exact, tokens = 0.0, 0.0, 0
    for prompt, keep, ids, number in zip(rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, LENGTHS):
        text = torch.cat([prompt[keep], ids[:number]])
        logps = (model(text[None]).logits[0, -number - 1 : -1] / 0.7).log_softmax(-1)
        sampled -= logps[torch.arange(number), ids[:number]].sum().item()
        exact -= (logps.exp() * logps).sum().item()
        tokens += number
    assert first["objective/entropy"] == pytest.approx(sampled / 8, rel=1e-5)
    assert first["policy/entropy_avg"] == pytest.approx(exact / tokens, rel=1e-5)
    assert all(entry["policy/entropy_avg"] >= 0 for entry in entries)


# The sums


def test_means_over_things_not_over_calls():
    sums = MetricSums()
    sums.add("a", 6.0, 3)
    sums.add("a", torch.tensor(2.0), torch.tensor(1))
    sums.add("never", 0.0, 0)
    assert sums.flush() == {"a": 2.0}
    assert sums.flush() == {}


def test_sums_keep_the_precision_of_plain_numbers():
    sums = MetricSums()
    sums.add("kl_coef", 0.05)
    sums.add("third", 1.0, 1 / 3)
    assert sums.flush() == {"kl_coef": 0.05, "third": 3.0}


def test_spread_of_values():
    sums = MetricSums()
    values = torch.tensor([1.0, 5.0, 3.0, 7.0, float("nan")])
    sums.add_all("reward/x", values[:2], torch.tensor([True, True]))
    sums.add_all("reward/x", values[2:], torch.tensor([True, True, False]))
    means = sums.flush()
    assert means["reward/x/mean"] == 4.0
    assert means["reward/x/std"] == pytest.approx(values[:4].std(correction=0).item())
    assert sums.flush() == {}


def test_processes_join_their_sums_also_for_names_that_one_lacks():
    here, there = MetricSums(), MetricSums()
    here.add("both", 1.0, 1)
    there.add("both", 5.0, 2)
    there.add("there", 4.0, 2)
    stacked = {}

    def reduce(tensor):
        stacked.setdefault("sum", torch.zeros_like(tensor))
        stacked["sum"] = stacked["sum"] + tensor
        return stacked["sum"]

    everyone = lambda names: ["both", "there"]  # noqa: E731
    here.flush(reduce, everyone)
    assert there.flush(reduce, everyone) == {"both": 2.0, "there": 2.0}


def test_sums_travel_as_plain_numbers():
    sums, again = MetricSums(), MetricSums()
    sums.add("a", torch.tensor(0.1), 3)
    again.load_state_dict(json.loads(json.dumps(sums.state_dict())))
    for part in (sums, again):
        part.add("a", 0.7, 3)
    assert again.flush() == sums.flush()


def test_lr_is_the_next_steps_and_learning_rate_the_last_ones(trainer):
    run = trainer(total_episodes=8, learning_rate=1e-3)
    run.train()
    rates = [SimpleNamespace(next=entry["lr"], last=entry["learning_rate"]) for entry in logged(run)]
    assert [rate.last for rate in rates] == [1e-3, 5e-4] and [rate.next for rate in rates] == [5e-4, 0.0]


def test_sums_that_a_checkpoint_brought_back_meet_those_of_the_device():
    """A resumed run on an accelerator: saved pairs are plain numbers, new ones live on the device."""
    sums = MetricSums()
    sums.load_state_dict({"loss": [2.0, 1.0]})
    sums.add("loss", torch.tensor(1.0, device="meta"))
    assert sums._sums["loss"].device.type == "meta"
