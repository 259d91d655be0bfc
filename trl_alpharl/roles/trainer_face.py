"""The side of the actor-critic that transformers' `Trainer` and its callbacks see: a model like any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .backbone import decoder_layers, decoder_of, unwrap_peft
from .cpu_attention import use_cpu_attention
from .merged import copy_fits, mergeable, merged_adapter


class TrainerFace:
    """What is asked of a transformers model, answered by the policy. `ActorCritic` mixes this in and holds `policy`,
    `reference`, `value_model`, `switch`, `adapters`,
    `merge_in_rollouts` and `compiled`."""

    def __getattr__(self, name: str) -> Any:
        """What the policy has and this module has not is an error that says where to find it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            policy = self.__dict__.get("_modules", {}).get("policy")
            if name.startswith("_") or policy is None or not hasattr(policy, name):
                raise
            raise AttributeError(
                f"trainer.model holds every role and has no {name!r}; use trainer.policy_model.{name}."
            ) from None

    @property
    def config(self) -> Any:
        """The policy's config."""
        return unwrap_peft(self.policy).config

    @property
    def generation_config(self) -> Any:
        """The policy's generation config."""
        return unwrap_peft(self.policy).generation_config

    def set_generation_config(self, config: Any) -> None:
        """Replace the policy's generation config."""
        unwrap_peft(self.policy).generation_config = config

    @property
    def dtype(self) -> torch.dtype:
        """The policy's dtype."""
        return unwrap_peft(self.policy).dtype

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return unwrap_peft(self.policy).device

    def fit_to_device(self, device: torch.device) -> None:
        """Choose kernels for the device that the roles are to run on."""
        if device.type == "cpu":
            for model in (self.policy, self.reference, self.value_model):
                if model is not None:
                    use_cpu_attention(unwrap_peft(model))

    def compile_layers(self) -> None:
        """Compile the decoder layers of policy and critic, one graph for all layers of a role. Rollouts stay as they
        are. From here on every pass records a graph, the scoring pass too: another kernel would round otherwise.

        Raises ValueError for a model whose layers are checkpointed: torch traces no checkpoint with a role's contexts.
        """
        if unwrap_peft(self.policy).is_activation_checkpointing:
            raise ValueError("compile_layers is on, but model is checkpointed; call gradient_checkpointing_disable().")
        for model in (self.policy, self.value_model):
            for layer in [] if model is None else decoder_layers(decoder_of(model)):
                layer.compile()
        self.compiled = True

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Around all `generate` calls of a rollout: eval mode, no gradients, the policy's adapter merged if it can be
        and `merge_in_rollouts` (None: if the copy fits) says so."""
        adapter, training = self.adapters["policy"], self.training
        merge = self.merge_in_rollouts is not False and adapter is not None and mergeable(self.policy)
        merge = merge and (self.merge_in_rollouts is True or copy_fits(self.policy))
        head = unwrap_peft(self.policy).get_output_embeddings()
        # The head gets a slice, (rows, 1, hidden) of longer rows. torch would take it for a batch of matrices and copy
        # the vocabulary's weights once a row: 0.9 GB for 16 prompts of a 135M model.
        hook = head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))
        # A mixture of experts would weigh its balancing loss by a mask of all tokens where a step has but one a row.
        text = self.config.get_text_config()
        balanced = getattr(text, "output_router_logits", False)
        if balanced:
            text.output_router_logits = False
        self.eval()
        try:
            with torch.no_grad(), merged_adapter(self.policy, adapter) if merge else nullcontext():
                with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
                    yield
        finally:
            hook.remove()
            if balanced:
                text.output_router_logits = balanced
            self.train(training)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the policy. PEFT's own `generate` would bring back a generation config that was set on it."""
        with self.switch.using(self.adapters["policy"]):
            return unwrap_peft(self.policy).generate(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True) -> None:
        """Save the policy as `trainer.save_model()` does, without the critic: a peft or a transformers folder."""
        from .saving import save_policy  # it imports ActorCritic, which has this face

        if is_main_process:
            save_policy(self, Path(save_directory))

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Tag the policy, for its model card."""
        unwrap_peft(self.policy).add_model_tags(tags)

    @property
    def model_tags(self) -> list[str] | None:
        """The policy's tags."""
        return getattr(unwrap_peft(self.policy), "model_tags", None)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute activations in the backward pass, each layer in the role it had in the forward.

        Raises ValueError for reentrant checkpointing and for a `context_fn` of the caller's: the roles need theirs.
        """
        kwargs = dict(activation_checkpointing_kwargs or {})
        if kwargs.get("use_reentrant"):
            raise ValueError(
                "gradient_checkpointing_kwargs.use_reentrant: true is not supported; the roles need false."
            )
        if "context_fn" in kwargs:
            raise ValueError(
                "gradient_checkpointing_kwargs.context_fn (selective checkpointing) is not supported here."
            )
        kwargs["use_reentrant"] = False
        unwrap_peft(self.policy).activation_checkpointing_enable(
            {**kwargs, "context_fn": self.switch.checkpoint_contexts}, every_n_layers=every_n_layers, offload=offload
        )
        if self.value_model is not None:
            unwrap_peft(self.value_model).activation_checkpointing_enable(
                kwargs, every_n_layers=every_n_layers, offload=offload
            )

    def activation_checkpointing_disable(self) -> None:
        """Keep activations again."""
        for model in (self.policy, self.value_model):
            if model is not None:
                unwrap_peft(model).activation_checkpointing_disable()

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers, offload)

    def gradient_checkpointing_disable(self) -> None:
        """The older name of `activation_checkpointing_disable`."""
        self.activation_checkpointing_disable()
