"""How much a backward pass keeps, measured on a few tokens: the number of rows that fit follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backbone import decoder_layers, decoder_of, unwrap_peft

TOKENS, COMPLETION = 64, 32  # of the row that is measured


def saved_bytes_per_token(actor_critic: Any, passes: Sequence[str] = ("policy+value",)) -> float:
    """Bytes that autograd keeps for each token of a row between a forward and its backward, in the greatest of a
    training step's `passes`: what each wants of `ActorCritic.forward`.

    What is kept grows with the tokens, so one short row stands for all. With activation checkpointing it is a layer's
    input for each layer and what one layer keeps while its turn comes in the backward.
    """
    device = actor_critic.device
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    places = torch.arange(TOKENS, device=device).unsqueeze(0)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # as in every chunk
    weights = {tensor.untyped_storage().data_ptr() for tensor in actor_critic.state_dict(keep_vars=True).values()}
    kept: dict[int, int] = {}
    most = 0

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    training = actor_critic.training
    actor_critic.eval()  # layers are checkpointed in training mode alone, and dropout is off in both
    try:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            for want in passes:
                with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    stats = actor_critic(
                        ids, mask, places, places[:, -COMPLETION - 1 : -1], ids[:, :COMPLETION], want=want
                    )
                del stats
                most = max(most, sum(kept.values()))
                kept.clear()
    finally:
        actor_critic.train(training)
    whole = most / TOKENS
    policy = unwrap_peft(actor_critic.policy)
    if not policy.is_activation_checkpointing:
        return whole
    layers, size = len(decoder_layers(decoder_of(policy))), policy.config.get_text_config().hidden_size
    return layers * size * policy.dtype.itemsize + whole / layers
