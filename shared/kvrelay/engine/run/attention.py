"""The forward of any supported model: transformers' own modules, with paged attention in the place of theirs.

Their attention is replaced through the attention and mask registries of transformers. The step's plan travels in a
context variable, because not every model passes unknown keyword arguments to its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvrelay.backends.backend import AttentionParams, StepAttention

ATTENTION_NAME = "kvrelay_paged"
"""The `attn_implementation` under which models find this module. It is registered without a mask function. transformers
then builds no mask and does not search the positions for packed sequences, which on a GPU would make the host wait in
every forward."""

OBSERVED_NAME = "kvrelay_observed"
"""The same, with the model's mask function in place of the mask; see `observing`."""

_MEANT = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
# Some models pass these. They have no effect here: their values are fixed for a causal decoder in inference, or address
# kernels of another kind.
_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"use_cache", "return_dict", "position_embeddings", "past_key_values", "logits_to_keep", "deterministic"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "layer_idx", "num_items_in_batch"}
)


class UnsupportedModel(ValueError):
    """The model needs something that the engine or the KV layout cannot do. The message names it."""


LayerAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, object, AttentionParams], torch.Tensor]
"""The attention of one layer over packed tokens, `[tokens, heads, head_dim]` in and out: layer, query, key, value, the
model's mask function (in `observing`), and what else the layer passes."""

MaskFunction = Callable[..., Any]
_attention: ContextVar[LayerAttention] = ContextVar("kvrelay_attention")


def register() -> None:
    """Registers both implementations with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention_forward)
    AttentionInterface.register(OBSERVED_NAME, _paged_attention_forward)
    AttentionMaskInterface.register(OBSERVED_NAME, _mask_function)


@contextmanager
def attending(step: StepAttention) -> Iterator[None]:
    """Makes forwards in this context attend through `step`."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: object, params: Any) -> torch.Tensor:
        return step.attend(layer, q, k, v, params)

    token = _attention.set(attend)
    try:
        yield
    finally:
        _attention.reset(token)


@contextmanager
def observing(model: PreTrainedModel, attention: LayerAttention) -> Iterator[None]:
    """Makes forwards of `model` in this context attend through `attention`, which gets the model's mask function as
    `mask`."""
    token = _attention.set(attention)
    model.set_attn_implementation(OBSERVED_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        _attention.reset(token)


def _mask_function(*, mask_function: MaskFunction | None = None, **_: Any) -> MaskFunction | None:
    """Returns the mask function itself instead of a filled mask."""
    return mask_function


def _paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention signature of transformers: `[1, heads, tokens, head_dim]` in, `[1, tokens, heads, head_dim]` out.
    Raises UnsupportedModel if the model passes an argument whose meaning is unknown here."""
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    _refuse_unknown(module, kwargs)
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(f"attention of {type(module).__name__} does not say its layer")
    if query.shape[0] != 1:
        raise UnsupportedModel(
            f"{type(module).__name__} attends over a batch of {query.shape[0]}, not over packed tokens"
        )
    out = _attention.get()(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), attention_mask, params
    )
    return out[None], None


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _MEANT or name in _WITHOUT_EFFECT or value is None:
            continue
        if name == "is_causal" and value:
            continue
        raise UnsupportedModel(f"{type(module).__name__} passes the unknown attention argument {name}={value!r}")


class Forward(Protocol):
    """One model's backbone and head. The head runs apart, over the hidden states that need logits."""

    @property
    def name(self) -> str:
        """The name that logs use."""
        ...

    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        """Runs the backbone over packed tokens `[tokens]`; returns `[tokens, hidden]` and writes the step's K/V."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits `[tokens, vocab]` of hidden states `[tokens, hidden]`, in the model's dtype or float32."""
        ...


class EagerForward:
    """A `Forward` that calls the model's modules."""

    name = "eager"

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes the backbone out of `model`, which is not usable by others afterwards. Raises UnsupportedModel if the
        model has no backbone of its own."""
        self._model = model
        self._backbone, self._head = split_head(model)
        self.products = "torch"
        """What multiplies the weights of linear layers, for logs."""

    @property
    def modules(self) -> torch.nn.ModuleList:
        """The head with what is around it, and the backbone."""
        return torch.nn.ModuleList([self._model, self._backbone])

    @torch.inference_mode()
    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        with attending(step):
            output = self._backbone(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
            )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits in the model's dtype."""
        self._head.set(hidden[None])
        return self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


class _BackboneOutput(BaseModelOutputWithPast):
    """The backbone output that heads read: the hidden states, and None for everything else (router logits, cross
    attention)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHiddenStates(torch.nn.Module):
    """Replaces the backbone. Returns hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self._output = _BackboneOutput()

    @property
    def decoder(self) -> _GivenHiddenStates:
        """Some heads (OPT's) use their backbone's decoder by this name."""
        return self

    def set(self, hidden: torch.Tensor) -> None:
        """Sets the `hidden` states, `[1, tokens, hidden]`, that the next forward returns."""
        self._output = _BackboneOutput(last_hidden_state=hidden)

    def forward(self, *_: Any, **__: Any) -> _BackboneOutput:
        """Returns the hidden states that were set, whatever the input."""
        return self._output


def split_head(model: PreTrainedModel) -> tuple[torch.nn.Module, _GivenHiddenStates]:
    """Removes the backbone from `model`, whose forward then runs its head alone (with its caps and scales)."""
    prefix = model.base_model_prefix
    backbone = getattr(model, prefix, None)
    if not isinstance(backbone, torch.nn.Module):
        raise UnsupportedModel(f"{type(model).__name__} has no backbone under {prefix!r}")
    head = _GivenHiddenStates()
    setattr(model, prefix, head)
    return backbone, head
