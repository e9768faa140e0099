"""The forward of any supported model: transformers' own modules, with paged attention in the place of theirs."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvrelay.backends.backend import StepAttention
from kvrelay.engine.run.attention import UnsupportedModel, attending


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
        """Takes the backbone out of `model`, which is not usable by others afterwards.

        Raises:
            UnsupportedModel: the model has no backbone of its own.
        """
        self._model = model
        self._backbone, self._head = split_head(model)

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
