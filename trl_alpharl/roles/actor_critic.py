"""One module for all roles: policy, reference and critic on as few copies of the weights as there can be."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..functional.frozen_head import frozen_head_logps_and_entropy
from ..functional.logps import chunked_logps_and_entropy
from ..records import TokenChunk, TokenStats
from . import adapters
from .backbone import FullPrecisionHead, check_head, decoder_of, hidden_states, take_positions, unwrap_peft
from .frozen_layers import FrozenLayers, frozen_layers
from .fused_lora import fuse_layers
from .fused_norm import fuse_norm_layers
from .merged import mergeable
from .prepare import (
    disable_dropout,
    first_bad_parameter,
    freeze,
    is_quantized,
    keep_quantized_layers_trainable,
    refuse_offloaded,
    refuse_shared_weights,
    require_adapters_only,
    require_trainable,
)
from .trainer_face import TrainerFace

Wanted = Literal["policy+value", "policy", "value"]


class ActorCritic(TrainerFace, nn.Module):
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
    trainable base weights under an adapter, prompt-learning adapters, logits computed in an unknown way, a reference
    that shares weights with what learns, roles in which nothing learns.
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
        fuse_lora: bool = True,
        fuse_norms: bool = True,
        merge_in_rollouts: bool | None = None,
        cache_frozen_layers: bool | None = None,
    ) -> None:
        super().__init__()
        for name, model in (("model", policy), ("ref_model", reference), ("value_model", value_model)):
            if model is not None:
                refuse_offloaded(model, name)
                keep_quantized_layers_trainable(model, name)
                disable_dropout(model)
        if value_model is not None:
            refuse_shared_weights(value_model, {"model": policy}, "value_model")
        if reference is not None:
            refuse_shared_weights(reference, {"model": policy, "value_model": value_model}, "ref_model")
            if ref_adapter_name is not None:
                raise ValueError("ref_adapter_name and ref_model are both set; the reference is one of them.")
        self.policy = policy
        self.value_model = value_model
        self.critic = "model" if value_model is not None else critic
        self.critic_detach = critic_detach
        if critic_detach and self.critic != "shared":
            raise ValueError(
                "critic_detach is set, but the critic has a trunk of its own; it goes with critic='shared'."
            )
        self.adapters: dict[str, str | None] = {"policy": None, "reference": None, "critic": None}
        if isinstance(policy, PeftModel):
            self._set_up_adapters(model_adapter_name, ref_adapter_name, own_reference=reference is None)
        else:
            self._check_full_policy(model_adapter_name, ref_adapter_name)
        if value_model is not None:
            adapters.let_critic_learn(value_model)
        if merge_in_rollouts and (self.adapters["policy"] is None or not mergeable(policy)):
            raise ValueError(
                "merge_lora_in_rollouts is true, but model has no adapter that can be added to its weights: LoRA, and "
                "nothing else, on layers that are neither quantized nor tied."
            )
        self.merge_in_rollouts = merge_in_rollouts
        self.compiled = False
        if fuse_lora:
            fuse_layers(policy)
        for model in (policy, value_model) if fuse_norms else ():
            if model is not None:
                fuse_norm_layers(model)
        self.switch = adapters.RoleSwitch(policy)
        self.switch.use(self.adapters["policy"])
        copies = []
        if reference is None and not isinstance(policy, PeftModel):
            reference = copy.deepcopy(policy)
            copies = [reference]
        self._frozen_layers = self._find_frozen_layers(cache_frozen_layers, copies)
        self.reference = None if reference is None else freeze(reference)
        self._set_up_heads()
        if any(unwrap_peft(m).is_activation_checkpointing for m in (policy, value_model) if m is not None):
            self.activation_checkpointing_enable()  # switched on before the roles were known: it needs their contexts

    def _set_up_adapters(self, policy_name: str | None, reference_name: str | None, own_reference: bool) -> None:
        """Name the adapter of each role, adding the frozen reference copy and the critic's adapter where needed."""
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

    def _check_full_policy(self, policy_name: str | None, reference_name: str | None) -> None:
        """Refuse what only a policy with adapters can do."""
        for field, name in (("model_adapter_name", policy_name), ("ref_adapter_name", reference_name)):
            if name is not None:
                raise ValueError(f"{field} is {name!r}, but model has no adapters.")
        if any(isinstance(module, BaseTunerLayer) for module in self.policy.modules()):
            raise ValueError(  # the roles would switch its layers off for good, and nothing but the critic would learn
                "model has adapter layers, but is no PeftModel (add_adapter, or the base that get_peft_model changed); "
                "pass the PeftModel, or load the base model anew."
            )
        if is_quantized(self.policy):
            raise ValueError("model is quantized, so its weights cannot train; pass peft_config (or use_peft: true).")
        if self.critic == "adapter":
            raise ValueError("critic='adapter' needs a LoRA policy; pass peft_config, or use critic='shared'.")
        require_trainable(self.policy, "model")

    def _find_frozen_layers(self, wanted: bool | None, copies: list[nn.Module]) -> FrozenLayers | None:
        found = None if wanted is False else frozen_layers(self.policy, copies)
        if wanted and found is None:
            raise ValueError(
                "cache_frozen_layers: model has no decoder layers below the lowest one that learns (lora_top_layers "
                "makes some), or it does not run them one after the other."
            )
        return found

    def _set_up_heads(self) -> None:
        inner = unwrap_peft(self.policy)
        self._head = _checked_head(inner, "model")
        self._reference_head = None
        if self.reference is not None:
            self._reference_head = _checked_head(unwrap_peft(self.reference), "ref_model")
            if self._reference_head.vocab_size < self._head.vocab_size:
                raise ValueError(
                    f"ref_model's vocabulary has {self._reference_head.vocab_size} tokens, fewer than "
                    f"model's {self._head.vocab_size}."
                )
        self.value_head: nn.Linear | None = None
        self.watch_head_gradient = False
        self.head_gradient = torch.zeros(())  # of the last forward, see `_watched`
        if self.value_model is None:
            hidden_size = inner.config.get_text_config().hidden_size
            self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)  # first values are 0 and the first value step leaves the trunk alone
            self.value_head.to(inner.get_input_embeddings().weight.device)
        elif not isinstance(getattr(unwrap_peft(self.value_model), "score", None), nn.Module):
            raise ValueError(
                "value_model has no `score` head; load it with AutoModelForSequenceClassification, num_labels=1."
            )

    def add_value_bias(self) -> None:
        """Give the value head a bias, which starts at 0. Raises ValueError for a critic that was passed as a model."""
        if self.value_head is None:
            raise ValueError("popart: it rescales a value head; value_model has its own, leave one of them out.")
        weight = self.value_head.weight
        self.value_head.bias = nn.Parameter(torch.zeros(1, dtype=weight.dtype, device=weight.device))

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
        entropy_grad: bool = True,
        frozen_hidden: Tensor | None = None,
    ) -> TokenStats:
        """Log-probs, entropies and values (R, C) of the completion tokens, with gradients.

        `input_ids, attention_mask, position_ids` (R, W), `predict_at, completion_ids` (R, C): see
        `records.TokenChunk`. `want="value"` runs a shared trunk without gradients: only the head learns.
        Without `entropy_grad` a backward through the entropies still works but costs more. `frozen_hidden`: see
        `frozen_hidden()`.
        """
        tokens = (input_ids, attention_mask, position_ids, frozen_hidden)
        logps = entropies = values = None
        with self.switch.using(self.adapters["policy"]):
            hidden = None
            if want != "value" or self.critic == "shared":
                with torch.no_grad() if want == "value" else nullcontext():
                    hidden = take_positions(self._hidden_states(self.policy, *tokens), predict_at)
            if want != "value":
                logps, entropies = self._token_logps(
                    self._head, self._watched(hidden), completion_ids, temperature, entropy_grad
                )
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
            frozen_hidden=chunk.frozen_hidden,
        )
        return stats, self.reference_logps(chunk, temperature)

    @torch.no_grad()
    def reference_logps(self, chunk: TokenChunk, temperature: float) -> Tensor:
        """The reference's log-probs (R, C) of a chunk's completion tokens, nats."""
        model, head = self.policy, self._head
        if self.reference is not None:
            model, head = self.reference, self._reference_head
        with self.switch.using(self.adapters["reference"]):
            tokens = (chunk.input_ids, chunk.attention_mask, chunk.position_ids, chunk.frozen_hidden)
            hidden = take_positions(self._hidden_states(model, *tokens), chunk.predict_at)
            return self._token_logps(head, hidden, chunk.completion_ids, temperature)[0]

    def frozen_hidden(self, chunk: TokenChunk) -> Tensor | None:
        """What the layers below the lowest learning one give for a chunk, (R, W, H). Weights that never change need to
        run once a rollout. None where there are none, or where they are not to be kept."""
        if self._frozen_layers is None:
            return None
        with self.switch.using(self.adapters["policy"]):
            return self._frozen_layers.run(chunk.input_ids, chunk.attention_mask, chunk.position_ids)

    def _hidden_states(
        self, model: nn.Module, ids: Tensor, mask: Tensor, positions: Tensor, frozen: Tensor | None
    ) -> Tensor:
        grad = torch.is_grad_enabled()
        # A model with weights of its own keeps its layers.
        with nullcontext() if frozen is None else self._frozen_layers.replaced_by(frozen):
            with torch.set_grad_enabled(grad or self.compiled):
                hidden = hidden_states(decoder_of(model), ids, mask, positions)
        return hidden if grad else hidden.detach()

    def _watched(self, hidden: Tensor) -> Tensor:
        """The head's input. With `watch_head_gradient` the backward pass leaves the squared norm of the policy loss's
        gradient there in `head_gradient`, a 0-d tensor that is new for every forward."""
        if not (self.watch_head_gradient and hidden.requires_grad):
            return hidden
        squares = self.head_gradient = torch.zeros((), device=hidden.device)
        watched = hidden.view_as(hidden)

        def note(gradient: Tensor) -> None:
            squares.add_(gradient.float().square().sum())

        watched.register_hook(note)
        return watched

    def _token_logps(
        self, head: Any, hidden: Tensor, ids: Tensor, temperature: float, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        heads = [part.frozen() for part in (self._head, self._reference_head) if part is not None]
        if all(part is not None for part in heads):  # all roles alike: equal weights must give a KL of exactly 0
            plain = heads[0] if head is self._head else heads[1]
            logps, entropies = frozen_head_logps_and_entropy(hidden, ids.flatten(), plain, temperature, entropy_grad)
        else:
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
                hidden = take_positions(self._hidden_states(self.policy, *tokens), predict_at)
        else:
            hidden = take_positions(self._hidden_states(self.value_model, *tokens[:3], None), predict_at)
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


def _checked_head(model: Any, name: str) -> FullPrecisionHead:
    head = FullPrecisionHead(model)
    try:
        check_head(model, head)
    except FloatingPointError as error:
        parameter = first_bad_parameter(model)
        if parameter is None:
            raise
        raise FloatingPointError(f"{name}: parameter {parameter!r} holds NaN or infinity.") from error
    return head
