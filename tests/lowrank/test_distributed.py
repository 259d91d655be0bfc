"""Two gloo processes on the CPU."""

import os
import pickle
import socket
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.distributed import PowerSGD, average_tensors, refuse_engine
from trl_alpharl.lowrank.optimizer import LowRankAdamW

EXACT = dict.fromkeys(("basis_storage", "moment_storage", "accumulator_storage", "plain_storage"), "fp32")
STEPS = 16


def two_processes(work, *arguments):
    """Run work(rank, *arguments) in two processes that can talk; returns what each gave back, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_start, (port, folder, work, *arguments), nprocs=2)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(2)]


def _start(rank, port, folder, work, *arguments):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    Path(folder, str(rank)).write_bytes(pickle.dumps(work(rank, *arguments)))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that takes its modules down


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 256), nn.Tanh(), nn.Linear(256, 192, bias=False))


def loss_of(model, step, half):
    """Mean over four rows; `half` 0 or 1 chooses which four of a step's eight."""
    generator = torch.Generator().manual_seed(step)
    mix = torch.randn(10, 192, generator=torch.Generator().manual_seed(99))
    x = (torch.randn(8, 10, generator=generator) @ mix)[half * 4 : half * 4 + 4]
    return (model(x) - x.roll(1, dims=1)).square().mean()


def projected(rank, changes):
    model = DistributedDataParallel(make_model())
    optimizer = LowRankAdamW(
        model.parameters(), lr=3e-3, config=LowRankConfig(rank=16, all_reduce="projected", **changes), max_grad_norm=1.0
    )
    norms = []
    for step in range(STEPS):
        with model.no_sync():
            if not (rank == 1 and step == 5):  # a process without a gradient of its own waits for no one
                loss_of(model, step, rank).backward()
        optimizer.step()
        norms.append(float(optimizer.last_norm))
        optimizer.zero_grad()
    return [p.detach().numpy() for p in model.module.parameters()], norms, optimizer.sent_bytes


@pytest.mark.slow
def test_projected_gradients_of_two_processes_are_those_of_one():
    changes = {"update_gap": 4, **EXACT}
    found = two_processes(projected, changes)
    (mine, norms, sent), (theirs, other_norms, _) = found[0], found[1]
    assert norms == other_norms and all((a == b).all() for a, b in zip(mine, theirs))

    model = make_model()
    optimizer = LowRankAdamW(model.parameters(), lr=3e-3, config=LowRankConfig(rank=16, **changes), max_grad_norm=1.0)
    for step in range(STEPS):
        for half in range(1 if step == 5 else 2):
            (loss_of(model, step, half) / 2).backward()
        if step == 5:  # one micro-batch: here the norm is exact, over processes it is an estimate
            (0 * loss_of(model, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, reference in zip(mine, model.parameters()):
        torch.testing.assert_close(torch.from_numpy(ours), reference.detach(), rtol=0, atol=1e-5)
    whole = sum(p.numel() for p in model.parameters()) * 4
    assert sent < whole / 5  # rank 16 of 192 rows, a sketch and one bias


def power_sgd(rank, wide):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(wide, wide, bias=False))
    exchange = PowerSGD(model, rank=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sent, losses = [], []
    mix = torch.randn(10, wide, generator=torch.Generator().manual_seed(99))
    for step in range(30):
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(2 * step + rank)) @ mix
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sent.append(exchange.sent_bytes)
        losses.append(float(loss.detach()))
    return sent, losses, model.module.weight.detach().numpy()


@pytest.mark.slow
def test_power_sgd_starts_early_and_sends_a_tenth():
    found = two_processes(power_sgd, 512)
    sent, losses, weight = found[0]
    whole = 512 * 512 * 4
    assert sent[0] == whole and all(s == 16 * (512 + 512) * 4 for s in sent[-15:])
    assert whole / sent[-1] >= 10
    assert losses[-1] < 0.3 * losses[0] and (weight == found[1][2]).all()


def with_trainer(rank, all_reduce, folder):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from trl_alpharl.lowrank.mixin import LowRankMixin

    class LowRankTrainer(LowRankMixin, Trainer):
        pass

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            ids = torch.randint(2, 64, (8,), generator=torch.Generator().manual_seed(i))
            return {"input_ids": ids, "labels": ids}

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    )
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=14,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=1e-3,
    )
    few = {"all_reduce_rank": 2} if all_reduce == "powersgd" else {}
    config = LowRankConfig(rank=4, all_reduce=all_reduce, update_gap=3, **few)
    trainer = LowRankTrainer(model, args, train_dataset=Rows(), low_rank=config)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    stays = trainer.low_rank_optimizer.accumulates
    return (
        [log.get("lowrank/sent_bytes") for log in logs],
        [log["grad_norm"] for log in logs],
        stays,
        [p.detach().numpy() for p in model.parameters()],
    )


@pytest.mark.slow
@pytest.mark.parametrize("all_reduce", ["full", "projected", "powersgd"])
def test_in_a_trainer_both_processes_end_with_the_same_weights(all_reduce, tmp_path):
    found = two_processes(with_trainer, all_reduce, str(tmp_path))
    sent, norms, takes, weights = found[0]
    assert all((a == b).all() for a, b in zip(weights, found[1][3]))
    assert takes == (all_reduce == "projected") and min(norms) > 0.05
    whole = 4 * sum(w.size for w in weights)
    if all_reduce == "full":
        assert sent == [whole] * 14
    else:
        assert sent[-1] < whole / 3


def refuse_both(rank):
    try:
        LowRankAdamW(make_model().parameters(), config=LowRankConfig(accumulate_in_subspace=True))
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_gradients_cannot_be_taken_and_exchanged_in_full():
    assert two_processes(refuse_both)[0].startswith("accumulate_in_subspace: true leaves nothing for all_reduce: full")


def buckets(rank):
    tensors = [torch.full((3, 2), float(rank)), torch.full((5,), 4.0 * rank, dtype=torch.bfloat16), torch.ones(())]
    sent = average_tensors(tensors)
    return [t.float().numpy() for t in tensors], sent


@pytest.mark.slow
def test_averages_go_by_dtype():
    averaged, sent = two_processes(buckets)[0]
    assert [float(a.mean()) for a in averaged] == [0.5, 2.0, 1.0] and sent == 6 * 4 + 5 * 2 + 4


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_engines_that_shard_gradients_are_refused_with_the_reason(kind):
    with pytest.raises(ValueError, match=f"^low-rank gradients do not work with {kind}: .+ Use DDP or one process"):
        refuse_engine(kind)
    refuse_engine("MULTI_GPU")
