"""One small model with many sets of weights on a leading axis: S runs cost about one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call, vmap
from transformers import LlamaConfig, LlamaForCausalLM

from .tasks import PAD, VOCABULARY, Task

Weights = dict[str, Tensor]

CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def new_model(seed: int = 0) -> LlamaForCausalLM:
    """The two-layer model of the study."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**CONFIG))


class StackedDecoder:
    """The model's decoder as a function of S sets of weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.decoder = model.model.eval()
        self._buffers = dict(self.decoder.named_buffers())
        self._run = vmap(self._one, in_dims=(0, 0, None))

    def _one(self, weights: Weights, ids: Tensor, mask: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        return functional_call(self.decoder, (weights, self._buffers), kwargs=inputs)[0]

    def __call__(self, weights: Weights, ids: Tensor) -> Tensor:
        """Hidden states (S, B, T, H) of ids (S, B, T)."""
        decoder = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
        width = ids.shape[-1]
        causal = torch.full((width, width), torch.finfo(torch.float32).min).triu(1)
        return self._run(decoder, ids, causal[None, None])


def stack(model: LlamaForCausalLM, copies: int, head: Tensor) -> Weights:
    """S copies of a model's decoder weights, and of a head (out, H) as `head.weight`."""
    parts = {**dict(model.model.named_parameters()), "head.weight": head}
    return {name: part.detach().expand(copies, *part.shape).clone().requires_grad_() for name, part in parts.items()}


class StackedAdamW:
    """AdamW (without decay) over S runs: each is clipped by its own norm, and may sit a step out."""

    def __init__(self, groups: list[Weights], lr: float, betas: tuple[float, float], max_norm: float) -> None:
        self.groups, self.lr, self.betas, self.max_norm = groups, lr, betas, max_norm
        self._moments = [
            {name: (torch.zeros_like(p), torch.zeros_like(p), torch.zeros(len(p))) for name, p in group.items()}
            for group in groups
        ]

    @torch.no_grad()
    def step(self, active: list[Tensor], lr_factor: float = 1.0) -> None:
        """One step of the runs that are active (S,) bool in each group; gradients are used up."""
        squares = sum(_per_run(p.grad.square()) for group in self.groups for p in group.values() if p.grad is not None)
        factor = (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for group, moments, runs in zip(self.groups, self._moments, active):
            for name, parameter in group.items():
                if parameter.grad is not None:
                    self._move(parameter, moments[name], factor, runs, lr_factor)
                parameter.grad = None

    def _move(self, parameter: Tensor, moments: tuple, factor: Tensor, runs: Tensor, lr_factor: float) -> None:
        first, second, steps = moments
        low, high = self.betas
        shape = (-1, *[1] * (parameter.dim() - 1))
        on, gradient = runs.view(shape), parameter.grad * factor.view(shape)
        steps += runs
        first.copy_(torch.where(on, low * first + (1 - low) * gradient, first))
        second.copy_(torch.where(on, high * second + (1 - high) * gradient.square(), second))
        count = steps.clamp(min=1).view(shape)
        update = (first / (1 - low**count)) / ((second / (1 - high**count)).sqrt() + 1e-8)
        parameter.sub_(torch.where(on, self.lr * lr_factor * update, 0.0))


def _per_run(squares: Tensor) -> Tensor:
    return squares.flatten(1).sum(1)


def pretrained(task: Task, cache: Path, steps: int = 400, rows: int = 128) -> LlamaForCausalLM:
    """The model that has read the task's examples: where every run starts. Made once, then read from the cache."""
    file = cache / f"{task.name}-{steps}.safetensors"
    model = new_model()
    if file.is_file():
        model.load_state_dict(load_file(file))
        return model
    generator = torch.Generator().manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        picked = torch.randint(len(task.prompts), (rows,), generator=generator).tolist()
        pairs = [(task.prompts[at], task.teach(task.prompts[at], generator)) for at in picked]
        start = len(pairs[0][0])
        width = start + task.answer_length
        ids = torch.tensor([[*prompt, *answer, *[PAD] * (width - start - len(answer))] for prompt, answer in pairs])
        counts = torch.tensor([[start <= t < start + len(answer) for t in range(width)] for _, answer in pairs])
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        kept = counts[:, 1:].flatten()
        (losses * kept).sum().div(kept.sum()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    cache.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)
    return model
