"""Several processes: averaging projected gradients, PowerSGD for full ones, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

POWERSGD_START = 10  # torch's own default is 1,000 steps, more than many fine-tuning runs have
_BUCKET_BYTES = 1 << 25


def is_distributed() -> bool:
    """Whether more than one process trains."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def refuse_sharded(parameter: nn.Parameter, name: str = "a parameter") -> None:
    """Raise ValueError for a parameter that is only a piece of a matrix on this process."""
    for sharded, owner in (
        (hasattr(parameter, "ds_id"), "DeepSpeed ZeRO-3"),
        (type(parameter).__name__ == "FlatParameter", "FSDP"),
        (hasattr(parameter, "device_mesh"), "FSDP2 or tensor parallelism"),
    ):
        if sharded:
            raise ValueError(
                f"low-rank gradients: {name} is sharded by {owner}; a shard is no matrix to project. Use DDP or one "
                "process: projected gradients and state are small."
            )


def refuse_engine(kind: str) -> None:
    """Raise ValueError for accelerate's distributed type when its engine leaves no gradients to project."""
    reasons = {
        "DEEPSPEED": "DeepSpeed steps inside backward and flattens or shards gradients",
        "FSDP": "FSDP shards gradients",
        "MEGATRON_LM": "Megatron shards gradients",
    }
    if kind in reasons:
        raise ValueError(f"low-rank gradients do not work with {kind}: {reasons[kind]}. Use DDP or one process.")


def average_tensors(tensors: list[Tensor]) -> int:
    """Average tensors over all processes in place, a bucket at a time; returns the bytes that one process sent in."""
    sent = 0
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(part.view_as(tensor))
        sent += flat.nbytes
    return sent


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if not buckets or size > _BUCKET_BYTES or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


def present_anywhere(has_gradient: list[bool], device: torch.device) -> list[bool]:
    """Which parameters have a gradient on some process: all must agree on what they exchange."""
    flags = torch.tensor(has_gradient, dtype=torch.int32, device=device)
    dist.all_reduce(flags)
    return (flags > 0).tolist()


class PowerSGD:
    """Low-rank gradient exchange with error feedback for a DistributedDataParallel model (Vogels et al. 2019, arXiv
    1905.13727): torch's hook, started early, with its bytes counted.

    The error memory is not part of a checkpoint: after resuming, what was still held back is lost once.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._run = powerSGD_hook.powerSGD_hook
        self.sent_bytes = 0  # by this process, in the last exchange
        self._running = 0
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
        model.register_comm_hook(state, self._hook)

    def _hook(self, state: Any, bucket):  # DDP refuses a bucket annotation that is a string
        compressed, whole = state.total_numel_after_compression, bucket.buffer().numel()
        size = bucket.buffer().element_size()
        started = state.iter >= state.start_powerSGD_iter
        future = self._run(state, bucket)
        self._running += size * (state.total_numel_after_compression - compressed if started else whole)
        if bucket.is_last():
            self.sent_bytes, self._running = self._running, 0
        if dist.get_backend() == "gloo":
            # Its threads run the hook's later exchanges whenever they come to it, so two processes could start theirs
            # in different orders; over nccl the order is that of the launches.
            future.wait()
        return future
