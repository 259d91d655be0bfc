"""One module for all roles: policy, reference and critic on as few copies of the weights as there can be."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..functional.logps import chunked_logps_and_entropy
from ..records import TokenChunk, TokenStats
from . import adapters
from .backbone import FullPrecisionHead, check_head, decoder_of, hidden_states, take_positions, unwrap_peft
from .prepare import (
    disable_dropout,
    freeze,
    is_quantized,
    keep_quantized_layers_trainable,
    refuse_offloaded,
    require_adapters_only,
)

Wanted = Literal["policy+value", "policy", "value"]


class ActorCritic(nn.Module):
    """Policy, reference and critic.

    | role      | LoRA policy                                              | full-parameter policy |
    |-----------|----------------------------------------------------------|-----------------------|
    | policy    | its adapter                                              | the model             |
    | reference | adapters off, or a frozen copy of an adapter that came   | a frozen copy of the  |
    |           | trained                                                  | model                 |
    | critic    | `shared`: a head on the policy's trunk; `adapter`: an    | `shared`              |
    |           | adapter and a head of its own                            |                       |

    A `reference` or a `value_model` that is passed takes the role instead.

    Training goes through `forward`, so that DDP's hooks fire. `forward` and `score` answer for completion tokens only;
    logits of all positions never exist.

    Raises ValueError for models that would train wrong: offloaded layers, a quantized policy without an adapter,
    trainable base weights under an adapter, prompt-learning adapters, logits computed in an unknown way.
    """

    def __init__(
        self,
        policy: nn.Module,
        reference: nn.Module | None = None,
        value_model: nn.Module | None = None,
        critic: Literal["shared", "adapter"] = "shared",
        critic_detach: bool = False,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
    ) -> None:
        super().__init__()
        for name, model in (("model", policy), ("ref_model", reference), ("value_model", value_model)):
            if model is not None:
                refuse_offloaded(model, name)
                keep_quantized_layers_trainable(model)
                disable_dropout(model)
        self.policy = policy
        self.value_model = value_model
        self.critic = "model" if value_model is not None else critic
        self.critic_detach = critic_detach
        self._set_up_adapters(model_adapter_name, ref_adapter_name, own_reference=reference is None)
        if reference is None and not isinstance(policy, PeftModel):
            reference = copy.deepcopy(policy)
        self.reference = None if reference is None else freeze(reference)
        self._set_up_heads()

    def _set_up_adapters(self, policy_name: str | None, reference_name: str | None, own_reference: bool) -> None:
        """Name the adapter of each role, adding the frozen reference copy and the critic's adapter where needed."""
        self.adapters: dict[str, str | None] = {"policy": None, "reference": None, "critic": None}
        if not isinstance(self.policy, PeftModel):
            if is_quantized(self.policy):
                raise ValueError(
                    "model is quantized, so its weights cannot train; pass peft_config (or use_peft: true)."
                )
            if self.critic == "adapter":
                raise ValueError("critic='adapter' needs a LoRA policy; pass peft_config, or use critic='shared'.")
        else:
            name = adapters.policy_adapter(self.policy, policy_name)
            adapters.require_lora(self.policy, name)
            learning = [name]
            self.adapters["policy"] = name
            if own_reference:
                self.adapters["reference"] = adapters.reference_adapter(self.policy, name, reference_name)
            if self.critic == "adapter":
                self.adapters["critic"] = adapters.add_value_adapter(self.policy, name)
                learning.append(adapters.VALUE_ADAPTER)
            require_adapters_only(self.policy, list(self.policy.peft_config))
            adapters.set_trainable(self.policy, learning)
            disable_dropout(self.policy)
        self.switch = adapters.RoleSwitch(self.policy)
        self.switch.use(self.adapters["policy"])

    def _set_up_heads(self) -> None:
        inner = unwrap_peft(self.policy)
        self._head = FullPrecisionHead(inner)
        check_head(inner, self._head)
        self._reference_head = None if self.reference is None else FullPrecisionHead(unwrap_peft(self.reference))
        self.value_head: nn.Linear | None = None
        if self.value_model is None:
            hidden_size = inner.config.get_text_config().hidden_size
            self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)  # first values are 0 and the first value step leaves the trunk alone
            self.value_head.to(inner.get_input_embeddings().weight.device)
        elif not isinstance(getattr(unwrap_peft(self.value_model), "score", None), nn.Module):
            raise ValueError(
                "value_model has no `score` head; load it with AutoModelForSequenceClassification, num_labels=1."
            )

    # Statistics of completion tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        predict_at: Tensor,
        completion_ids: Tensor,
        temperature: float = 1.0,
        want: Wanted = "policy+value",
    ) -> TokenStats:
        """Log-probs, entropies and values (R, C) of the completion tokens, with gradients.

        `input_ids, attention_mask, position_ids` (R, W), `predict_at, completion_ids` (R, C): see
        `records.TokenChunk`. `want="value"` runs a shared trunk without gradients: only the head learns.
        """
        tokens = (input_ids, attention_mask, position_ids)
        logps = entropies = values = None
        with self.switch.using(self.adapters["policy"]):
            hidden = None
            if want != "value" or self.critic == "shared":
                with torch.no_grad() if want == "value" else nullcontext():
                    hidden = take_positions(hidden_states(decoder_of(self.policy), *tokens), predict_at)
            if want != "value":
                logps, entropies = self._token_logps(self._head, hidden, completion_ids, temperature)
        if want != "policy":
            values = self._values(tokens, predict_at, hidden)
        return TokenStats(logps, entropies, values)

    @torch.no_grad()
    def score(self, chunk: TokenChunk, temperature: float) -> tuple[TokenStats, Tensor]:
        """What every role says about a chunk: the policy's statistics and the reference's log-probs (R, C)."""
        stats = self.forward(
            chunk.input_ids,
            chunk.attention_mask,
            chunk.position_ids,
            chunk.predict_at,
            chunk.completion_ids,
            temperature,
        )
        return stats, self.reference_logps(chunk, temperature)

    @torch.no_grad()
    def reference_logps(self, chunk: TokenChunk, temperature: float) -> Tensor:
        """The reference's log-probs (R, C) of a chunk's completion tokens, nats."""
        model, head = self.policy, self._head
        if self.reference is not None:
            model, head = self.reference, self._reference_head
        with self.switch.using(self.adapters["reference"]):
            hidden = hidden_states(decoder_of(model), chunk.input_ids, chunk.attention_mask, chunk.position_ids)
            hidden = take_positions(hidden, chunk.predict_at)
            return self._token_logps(head, hidden, chunk.completion_ids, temperature)[0]

    def _token_logps(self, head: Any, hidden: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logps, entropies = chunked_logps_and_entropy(
            hidden,
            ids.flatten(),
            head,
            temperature,
            vocab_size=head.vocab_size,
            context_fn=self.switch.checkpoint_contexts,
        )
        return logps.view_as(ids), entropies.view_as(ids)

    def _values(self, tokens: tuple[Tensor, ...], predict_at: Tensor, policy_hidden: Tensor | None) -> Tensor:
        if self.critic == "shared":
            hidden = policy_hidden.detach() if self.critic_detach else policy_hidden
        elif self.critic == "adapter":
            with self.switch.using(self.adapters["critic"]):
                hidden = take_positions(hidden_states(decoder_of(self.policy), *tokens), predict_at)
        else:
            hidden = take_positions(hidden_states(decoder_of(self.value_model), *tokens), predict_at)
        with torch.autocast(hidden.device.type, enabled=False):
            if self.value_head is not None:
                values = self.value_head(hidden.float())
            else:
                score = unwrap_peft(self.value_model).score
                values = score(hidden.to(next(score.parameters()).dtype)).float()
        return values.view(predict_at.shape)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters that serve the critic alone."""
        parameters: list[nn.Parameter] = []
        if self.value_model is not None:
            parameters += [p for p in self.value_model.parameters() if p.requires_grad]
        if self.value_head is not None:
            parameters += list(self.value_head.parameters())
        if self.critic == "adapter":
            parameters += [p for _, p in adapters.adapter_parameters(self.policy, adapters.VALUE_ADAPTER)]
        return parameters

    # What transformers' Trainer and its callbacks expect of a model

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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the policy."""
        with self.switch.using(self.adapters["policy"]):
            return self.policy.generate(*args, **kwargs)

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
        _enable(
            unwrap_peft(self.policy), {**kwargs, "context_fn": self.switch.checkpoint_contexts}, every_n_layers, offload
        )
        if self.value_model is not None:
            _enable(unwrap_peft(self.value_model), kwargs, every_n_layers, offload)

    def activation_checkpointing_disable(self) -> None:
        """Keep activations again."""
        for model in (self.policy, self.value_model):
            if model is not None:
                inner = unwrap_peft(model)
                disable = (
                    getattr(inner, "activation_checkpointing_disable", None) or inner.gradient_checkpointing_disable
                )
                disable()

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


def _enable(model: Any, kwargs: dict[str, Any], every_n_layers: int, offload: bool) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(kwargs, every_n_layers=every_n_layers, offload=offload)
    else:
        model.gradient_checkpointing_enable(kwargs)
