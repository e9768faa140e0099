"""The modules of a stage in the place of those that other stages have.

The model's own forward runs on every stage. What is absent passes hidden states on, so that layers keep their numbers,
by which some models choose masks and rotary angles. The stage's input takes the place of the output of the layer
before, whatever the model made of the embeddings.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.engine.parallel.stage_link import StageLink
from kvrelay.engine.parallel.stage_plan import StagePlan


class AbsentModule(nn.Module):
    """A module that another stage has. A layer returns its input."""

    def __init__(self, original: nn.Module | None = None) -> None:
        """Keeps what models read of their layers from outside, such as `attention_type`."""
        super().__init__()
        for name, value in vars(original).items() if original is not None else ():
            if isinstance(value, str | int) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class StageEmbedding(nn.Module):
    """Receives the stage's input, `[..., tokens, hidden]`, in the place of embeddings. `table` is a tied head's."""

    def __init__(self, link: StageLink, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._link = link
        self._size, self._dtype, self._device = hidden_size, dtype, device
        self.received: torch.Tensor | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        received = self._link.receive((*token_ids.shape, self._size), self._dtype)
        self.received = received.to(self._device)
        return self.received


class EntryLayer(AbsentModule):
    """The last layer before the stage's own: returns the stage's input."""

    def __init__(self, original: nn.Module, embedding: StageEmbedding) -> None:
        super().__init__(original)
        self._embedding = [embedding]  # no child of this module

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        embedding = self._embedding[0]
        received, embedding.received = embedding.received, None
        assert received is not None
        return received


class ExitLayer(AbsentModule):
    """The first layer behind the stage's own: sends the stage's output on."""

    def __init__(self, original: nn.Module, link: StageLink) -> None:
        super().__init__(original)
        self._link = link

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._link.send(hidden)
        return hidden


class StageHead(nn.Module):
    """The head, which only the last stage has. While `is_shared`, all stages get its logits, for the checks of a start;
    otherwise other stages get `[..., 0]`."""

    def __init__(self, head: nn.Module | None, vocab_size: int, link: StageLink) -> None:
        super().__init__()
        self.head = head
        self.is_shared = True
        self._vocab_size = vocab_size
        self._link = link

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.head is not None:
            logits: torch.Tensor = self.head(hidden)
        elif self.is_shared:
            logits = hidden.new_zeros((*hidden.shape[:-1], self._vocab_size))
        else:
            return hidden[..., :0]
        if self.is_shared:
            # Only rank 0's logits count: the other ranks of its stage have the same ones.
            logits = logits.contiguous() if self._link.group.rank == 0 else torch.zeros_like(logits)
            self._link.group.all_reduce(logits)
        return logits


def drop_absent(model: PreTrainedModel, plan: StagePlan) -> None:
    """Drops what other stages have from a whole model, whose parameters may be on the meta device."""
    for path in plan.absent:
        model.set_submodule(path, AbsentModule(model.get_submodule(path)))


def connect_stage(model: PreTrainedModel, plan: StagePlan, link: StageLink) -> StageHead:
    """Connects a stage's model to the stages beside it. Its own layers are numbered from 0, as their KV is. Returns the
    head."""
    modules: dict[str, Any] = dict(model.named_modules())
    layers, own = cast("nn.ModuleList", modules[plan.layer_list]), plan.own_layers
    for index in own:
        for module in layers[index].modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = int(module.layer_idx) - own.start  # type: ignore[assignment,arg-type]
    replaced: dict[str, nn.Module] = {}
    if not plan.is_first:
        config = model.config.get_text_config(decoder=True)
        embedding = StageEmbedding(link, config.hidden_size, model.dtype, model.device)
        replaced[plan.embedding] = embedding
        replaced[f"{plan.layer_list}.{own.start - 1}"] = EntryLayer(layers[own.start - 1], embedding)
    if not plan.is_last:
        replaced[f"{plan.layer_list}.{own.stop}"] = ExitLayer(layers[own.stop], link)
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    head = replaced[plan.head] = StageHead(modules[plan.head] if plan.is_last else None, vocab_size, link)
    for path, module in replaced.items():
        model.set_submodule(path, module)
    return head
