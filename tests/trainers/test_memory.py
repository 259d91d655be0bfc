"""Memory: a longer rollout costs its record and nothing else; a longer run costs nothing."""

from __future__ import annotations

import copy
import gc
import weakref

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from trl_alpharl.records import Advantages

BYTES_A_TOKEN = 64  # of the record: prompt and completion tokens, padding included


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage):
        key = id(storage)
        if key in self.live or not storage.nbytes():
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.live[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key, size):
        del self.live[key]
        self.now -= size


def record_of(experience):
    """The tensors of a rollout record."""
    parts = (experience, experience.scored, experience.scored.rollout)
    return [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]


def tokens_of(rollout):
    """Prompt and completion positions, padding included."""
    return rollout.prompt_ids.numel() + rollout.completion_ids.numel()


def run_of(trainer, model, completions, **changes):
    """A trainer whose rollout has this many completions; generation and training in chunks of 8 and 2."""
    values = {"gradient_accumulation_steps": completions // 2, "local_rollout_forward_batch_size": 8}
    return trainer(model=copy.deepcopy(model), **{**values, "total_episodes": completions, **changes})


def test_the_record_takes_64_bytes_a_token(trainer):
    run = trainer(response_length=24, stop_token=None)
    experience = run.collect(0)
    held = sum(tensor.nbytes for tensor in record_of(experience))
    assert held <= BYTES_A_TOKEN * tokens_of(experience.scored.rollout)


def test_peak_memory_grows_by_the_record_alone(trainer, model):
    """8 against 64 completions."""

    def measure(completions):
        run = run_of(trainer, model, completions, stop_token=None, response_length=24, num_ppo_epochs=1)
        sizes = []
        advantages = run.advantages

        def weighed(scored):
            experience = advantages(scored)
            sizes.append(sum(tensor.nbytes for tensor in record_of(experience)))
            return experience

        run.advantages = weighed
        with PeakBytes() as memory:
            run.train()
        return memory.peak, sizes[0]

    (few, few_record), (many, many_record) = measure(8), measure(64)
    assert many_record > 7 * few_record
    assert many - few <= many_record - few_record + 1024


def records():
    """Rollout records that are alive."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Advantages)]


class Census(TrainerCallback):
    """Bytes of all tensors alive after each step that are neither weights, moments nor the rollout record."""

    def __init__(self):
        self.other = []
        self.earlier = records()  # of another test

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        held = [record for record in records() if not any(record is old for old in self.earlier)]
        alive = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        alive = [tensor for tensor in alive if not isinstance(tensor, FakeTensor)]  # of a test that compiled: no memory
        known = [*model.state_dict().values(), *model.buffers()]
        known += [value for moments in optimizer.state.values() for value in moments.values()]
        known += [tensor for record in held for tensor in record_of(record)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in known}
        rest = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in alive
            if tensor.untyped_storage().data_ptr() not in storages
        }
        self.other.append((sum(rest.values()), len(held)))


def test_nothing_of_a_rollout_survives_a_step_but_its_record(trainer, model):
    def measure(completions):
        census = Census()
        run = run_of(trainer, model, completions, total_episodes=2 * completions, callbacks=[census])
        run.train()
        assert len(records()) == len(census.earlier)
        return census.other

    few, many = measure(8), measure(64)
    assert [count for _, count in few] == [count for _, count in many] == [1, 1, 1, 1]
    for (bytes_few, _), (bytes_many, _) in zip(few, many):
        assert bytes_many - bytes_few <= 1024


@pytest.mark.slow
def test_a_long_run_takes_no_more_memory_than_a_short_one(trainer):
    """Resident memory after 10 and after 60 updates."""
    resident = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            gc.collect()
            resident[state.global_step] = psutil.Process().memory_info().rss

    run = trainer(total_episodes=60 * 8, num_ppo_epochs=1, callbacks=[Look()])
    run.train()
    assert abs(resident[60] - resident[10]) < 0.02 * resident[10]
