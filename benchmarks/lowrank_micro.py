"""Low-rank gradients on the gradients of a real model.

    python benchmarks/lowrank_micro.py methods|optimizer|norm|exchange [--model DIR] [--short] [--out FILE]

methods    every subspace method: error above the optimal one of its rank, share of the next gradient's energy that it
           keeps, time over that of the exact SVD.
optimizer  LowRankAdamW over foreach AdamW on all weights, the projection of gradients included: an ordinary step and
one
           that renews every basis.
norm       error of the estimated gradient norm after several micro-batches.
exchange   two processes over gloo: bytes a step and evaluation loss with full, PowerSGD and projected gradients; the
           last under LowRankAdamW at its own learning rate, so its loss is no comparison with the others'.

Without --model, benchmarks/get_smollm2.py makes SmolLM2-135M-Instruct (dequantised from 4 bits). Gradients are policy
gradients with normal advantages over the embedded corpus, in fp32. Ratios are taken inside one process, interleaved;
their medians are printed. --short: fewer matrices, repetitions and steps; for a look, not for a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from speed.options import command_line
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_alpharl.builtin.corpus import stories
from trl_alpharl.functional.subspace import SUBSPACE_METHODS, find_basis, project
from trl_alpharl.lowrank.config import LowRankConfig
from trl_alpharl.lowrank.distributed import PowerSGD
from trl_alpharl.lowrank.optimizer import LowRankAdamW

RANKS = (16, 64, 128)
RANK = 64  # of the optimizer's arms
MICRO_BATCHES, ROWS = 4, 4
EXCHANGES = {"full": 0, "powersgd rank 16": 16, "powersgd rank 32": 32, "projected": 0}  # PowerSGD's rank


class Corpus:
    """Batches of stories, tokenized; `seed` draws the stories."""

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self.texts = stories(4096, seed)
        self.tokenizer = tokenizer
        self.tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.tokenizer.padding_side = "right"

    def batch(self, number: int, rows: int = ROWS) -> dict[str, Tensor]:
        """Rows `number * rows` and following."""
        texts = self.texts[number * rows : (number + 1) * rows]
        found = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=48)
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


def policy_loss(model: nn.Module, batch: dict[str, Tensor], seed: int) -> Tensor:
    """Minus the mean over tokens of a normal advantage a row times the log-prob."""
    logps = model(**batch).logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask = batch["attention_mask"][:, 1:].bool()
    advantages = torch.randn(len(logps), 1, generator=torch.Generator().manual_seed(seed))
    return -(advantages * logps)[mask].sum() / mask.sum()


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, padding left out."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return model(**batch, labels=labels).loss


def gradients(model: nn.Module, corpus: Corpus, count: int) -> Iterator[dict[str, Tensor]]:
    """Policy gradients of `count` batches in a row, by parameter name."""
    for number in range(count):
        model.zero_grad()
        policy_loss(model, corpus.batch(number), seed=number).backward()
        yield {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the processor seconds it took: on one thread, they are less sensitive to what else runs."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


# methods


def methods(model: nn.Module, corpus: Corpus, short: bool) -> list[dict[str, Any]]:
    """One row a method and rank."""
    depth = model.config.num_hidden_layers
    layers = tuple(f"layers.{i}." for i in ((depth // 2,) if short else (depth // 15, depth // 2, depth - 2)))
    parts = list(gradients(model, corpus, 2 * MICRO_BATCHES))
    first, second = ({name: sum(part[name] for part in half) for name in parts[0]} for half in (parts[:4], parts[4:]))
    chosen = [name for name in first if any(layer in name for layer in layers) and first[name].ndim == 2]
    rows = []
    for rank in RANKS[:2] if short else RANKS:
        seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SUBSPACE_METHODS}
        for name in chosen:
            matrix, following = first[name].T, second[name].T
            if rank >= min(matrix.shape):
                continue
            (_, values, _), exact_s = timed(lambda matrix=matrix: torch.linalg.svd(matrix, full_matrices=False))
            for method, found in seen.items():
                found.append(_measure(method, matrix, following, values, rank, exact_s))
        for method, found in seen.items():
            excess, kept, ratio = (list(column) for column in zip(*found))
            rows.append(
                {
                    "method": method,
                    "rank": rank,
                    "excess_error_mean": statistics.fmean(excess),
                    "excess_error_worst": max(excess),
                    "next_energy_kept": statistics.fmean(kept),
                    "time_over_svd": statistics.median(ratio),
                }
            )
    return rows


def _measure(
    method: str, matrix: Tensor, following: Tensor, values: Tensor, rank: int, exact_s: float
) -> tuple[float, float, float]:
    warm = project(find_basis("svd", following, rank, torch.Generator()), following) if method == "power" else None
    basis, seconds = timed(lambda: find_basis(method, matrix, rank, torch.Generator().manual_seed(0), warm))
    error = (matrix.double() - basis.double() @ (basis.double().T @ matrix.double())).norm()
    best = values[rank:].double().square().sum().sqrt()
    kept = project(basis, following).square().sum() / following.square().sum()
    return float(error / best - 1), float(kept), seconds / exact_s


# optimizer


def optimizer(model: nn.Module, corpus: Corpus, short: bool) -> list[dict[str, Any]]:
    """Seconds and ratios of a step of each arm; gradients are handed to all of them."""
    (found,) = gradients(model, corpus, 1)
    pairs = [(p, found[name]) for name, p in model.named_parameters()]
    arms = {
        "adamw": torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True),
        "lowrank": _low_rank(model, update_gap=0),
        "lowrank, every basis renewed": _low_rank(model, update_gap=1),
        "lowrank, short side": _low_rank(model, update_gap=0, side="short"),
        "lowrank, fp32 moments": _low_rank(model, update_gap=0, moment_storage="fp32"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for round_number in range(4 if short else 12):
        for name, arm in arms.items():
            _, project_s = timed(lambda arm=arm: hand_over(arm, pairs))
            _, step_s = timed(arm.step)
            if round_number > 1:  # the first steps make states and first bases
                times[name].append((project_s, step_s))
    rows = []
    for name, seconds in times.items():
        # AdamW's gradients are where backward left them; a projection is work that backward does not have then.
        whole = [step_s + (0 if name == "adamw" else project_s) for project_s, step_s in seconds]
        steps = [step_s for _, step_s in seconds]
        base = [step_s for _, step_s in times["adamw"]]
        ordinary = [sum(pair) for pair in times["lowrank"]]
        rows.append(
            {
                "arm": name,
                "step_s": statistics.median(steps),
                "step_over_adamw": statistics.median(a / b for a, b in zip(steps, base)),
                "with_projection_over_adamw": statistics.median(a / b for a, b in zip(whole, base)),
                "with_projection_over_ordinary": statistics.median(a / b for a, b in zip(whole, ordinary)),
            }
        )
    return rows


def _low_rank(model: nn.Module, **changes: Any) -> LowRankAdamW:
    arm = LowRankAdamW(model.parameters(), lr=1e-6, config=LowRankConfig(rank=RANK, **changes))
    arm.taker.release()  # gradients are handed over, one arm after the other
    return arm


def hand_over(arm: torch.optim.Optimizer, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Give an optimizer gradients as backward would: to `p.grad`, or through the projection."""
    for parameter, gradient in pairs:
        parameter.grad = gradient
        if isinstance(arm, LowRankAdamW) and arm.observe(parameter):
            parameter.grad = None


# norm


def norm(model: nn.Module, corpus: Corpus, short: bool) -> list[dict[str, Any]]:
    """Relative errors of the norm over seeds, with the first basis (random) and with a found one."""
    parts = list(gradients(model, corpus, MICRO_BATCHES))
    names = [name for name, _ in model.named_parameters()]
    truth = float(torch.stack([sum(part[name] for part in parts).square().sum() for name in names]).sum().sqrt())
    errors: dict[str, list[float]] = {"first step": [], "later steps": []}
    widths = (4,) if short else (4, 16)
    rows = []
    for width in widths:
        for seed in range(3 if short else 40):
            arm = _low_rank(model, seed=seed, norm_sketch=width, update_gap=0)
            for when in errors:
                for group in arm.param_groups:
                    group["lr"] = 0.0
                model.zero_grad()
                for part in parts:
                    _add_up(arm, model, part)
                errors[when].append(abs(float(arm.grad_norm()) / truth - 1))
                arm.step()
        for when, found in errors.items():
            ordered = sorted(found)
            at_95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            rows.append({"sketch": width, "when": when, "p50": statistics.median(ordered), "p95": at_95})
            found.clear()
    return rows


def _add_up(arm: LowRankAdamW, model: nn.Module, part: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        before, parameter.grad = parameter.grad, part[name]
        if arm.observe(parameter):
            parameter.grad = None
        elif before is not None:
            parameter.grad = before + part[name]


# exchange


def exchange(folder: str, short: bool) -> list[dict[str, Any]]:
    """One row an arm: two processes, next-token loss."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for arm in EXCHANGES:
            out = Path(scratch) / arm
            mp.spawn(_train, (port, folder, arm, 14 if short else 40, str(out)), nprocs=2)
            rows.append(json.loads(out.read_text()))
    for row in rows:
        row["loss_over_full"] = row["eval_loss"] - rows[0]["eval_loss"]
        row["times_fewer_bytes"] = rows[0]["sent_bytes"] / row["sent_bytes"]
    return rows


def _train(rank: int, port: int, folder: str, arm: str, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, corpus = load(folder)
    wrapped = nn.parallel.DistributedDataParallel(model)
    power_sgd = PowerSGD(wrapped, rank=EXCHANGES[arm]) if EXCHANGES[arm] else None
    if arm == "projected":
        config = LowRankConfig(rank=RANK, all_reduce="projected")
        learner: Any = LowRankAdamW(model.parameters(), lr=1.5e-4, config=config, max_grad_norm=1.0)
    else:
        learner = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for step in range(steps):
        learner.zero_grad()
        if arm == "projected":
            with wrapped.no_sync():
                next_token_loss(wrapped, corpus.batch(2 * step + rank)).backward()
        else:
            next_token_loss(wrapped, corpus.batch(2 * step + rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learner.step()
    held_out = Corpus(corpus.tokenizer, seed=99)
    with torch.no_grad():
        loss = statistics.fmean(float(next_token_loss(model, held_out.batch(i, 8))) for i in range(16))
    sent = sum(p.numel() for p in model.parameters()) * 4
    if arm == "projected":
        sent = learner.sent_bytes
    elif power_sgd is not None:
        sent = power_sgd.sent_bytes
    if rank == 0:
        Path(out).write_text(json.dumps({"arm": arm, "eval_loss": loss, "sent_bytes": sent}))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that takes its modules down


# the command


def load(folder: str) -> tuple[nn.Module, Corpus]:
    """Model in fp32 and its corpus."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, Corpus(AutoTokenizer.from_pretrained(folder))


def main() -> None:
    """Measure, print a table, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["methods", "optimizer", "norm", "exchange"])
    parser.add_argument("--model", help="a transformers folder; default: SmolLM2 by get_smollm2.py")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/lowrank_<what>.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.model
    if folder is None:
        from get_smollm2 import get_smollm2

        folder = str(get_smollm2(dtype="float32"))
    if options.what == "exchange":
        rows = exchange(folder, options.short)
    else:
        rows = {"methods": methods, "optimizer": optimizer, "norm": norm}[options.what](*load(folder), options.short)
    print(table(rows))
    versions = {name: version(name) for name in ("torch", "transformers")}
    command = " ".join(command_line("lowrank_micro.py"))
    print(f"\n{command}\n{versions}")
    out = options.out or Path(f"benchmarks/results/lowrank_{options.what}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": command, "versions": versions, "short": options.short, "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for row in rows:
        cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
