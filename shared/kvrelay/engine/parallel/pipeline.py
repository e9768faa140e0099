"""Pipeline parallelism: which layers a stage holds.

The first stage has the embeddings, the last one the final norm and the head. The parts of a model are named by the
pipeline plan of transformers, or else found: the decoder layers are the backbone's only list of that length.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
import zmq
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, RankLost
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.kv.shard_map import ShardShape, layers_of_stage
from kvrelay.messaging.zmq_context import ZmqContext


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage has of a model. Paths are those of `named_modules`. `norm` is empty if the plan names none.

    `layer_list`: the path of all decoder layers, of which the stage has `own_layers`. `is_tied`: the head's weights are
    those of the embeddings, so the last stage has both.
    """

    stage: int
    num_stages: int
    num_layers: int
    layer_list: str
    embedding: str
    norm: str
    head: str
    is_tied: bool

    @property
    def own_layers(self) -> range:
        return layers_of_stage(self.num_layers, self.stage, self.num_stages)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def absent_layers(self) -> list[int]:
        return [index for index in range(self.num_layers) if index not in self.own_layers]

    @property
    def absent(self) -> tuple[str, ...]:
        """The modules that only other stages have."""
        paths = [f"{self.layer_list}.{index}" for index in self.absent_layers]
        if not self.is_first and not (self.is_last and self.is_tied):
            paths.append(self.embedding)
        if not self.is_last:
            paths += [path for path in (self.norm, self.head) if path]
        return tuple(paths)

    def has(self, path: str) -> bool:
        """Returns whether this stage has a module or a parameter."""
        return not any(path == absent or path.startswith(f"{absent}.") for absent in self.absent)


def config_of_stage(config: PreTrainedConfig, plan: StagePlan) -> PreTrainedConfig:
    """The config of a stage's model: only the last stage has a head that may be tied."""
    own = deepcopy(config)
    for each in (own, own.get_text_config(decoder=True)) if not plan.is_last else ():
        each.tie_word_embeddings = False
    return own


def plan_stage(model: PreTrainedModel, stage: int, num_stages: int) -> StagePlan:
    """Returns the plan of a stage for a whole model, whose parameters may be on the meta device. Raises
    UnsupportedModel if there are fewer layers than stages, or the model's parts are not found."""
    config = model.config.get_text_config(decoder=True)
    num_layers, prefix = int(config.num_hidden_layers), model.base_model_prefix
    what = f"{type(model).__name__} with pipeline_parallel_size = {num_stages}"
    if num_layers < num_stages:
        raise UnsupportedModel(f"{what}: it has {num_layers} layers, and each stage needs one")
    backbone = getattr(model, prefix, None)
    if not isinstance(backbone, nn.Module):
        raise UnsupportedModel(f"{what}: it has no backbone under {prefix!r}")
    children = dict(backbone.named_children())
    lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(lists) != 1:
        raise UnsupportedModel(f"{what}: its backbone has {len(lists)} lists of {num_layers} layers, and not one")
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UnsupportedModel(f"{what}: its embeddings or its head are no plain table")
    planned = getattr(config, "base_model_pp_plan", None) or {}
    norms = [name for name in planned if name in children and children[name] not in (embedding, children[lists[0]])]
    return StagePlan(
        stage=stage,
        num_stages=num_stages,
        num_layers=num_layers,
        layer_list=f"{prefix}.{lists[0]}",
        embedding=paths[embedding],
        norm=f"{prefix}.{norms[0]}" if len(norms) == 1 else "",
        head=paths[head],
        is_tied=bool(getattr(model.config, "tie_word_embeddings", False)),
    )


_POLL_MS = 100
"""Time between looks at whether this rank has left while it waits for the stage before."""
_NUMBER_BYTES = 8


class PipelineLink:
    """A rank's link. If a stage has several ranks, each is linked to those of the same number in the stages beside it.
    `waited_s`: seconds that it has waited for hidden states."""

    def __init__(self, group: GroupCoordinator, num_stages: int, receiver: Any, sender: Any) -> None:
        """`group` has the ranks of all stages. `receiver` and `sender` are None where there is no stage before or
        behind."""
        self.group = group
        self.num_stages = num_stages
        self.stage = _shape(group, num_stages).stage_of(group.rank)
        self.is_first = self.stage == 0
        self.waited_s = 0.0
        self._receiver, self._sender = receiver, sender
        self._num_received = self._num_sent = 0

    @classmethod
    def connect(cls, group: GroupCoordinator, num_stages: int) -> Self:
        """Connects the stages, among which a group's ranks are divided as `ShardShape` says. All call it at the same
        time. Raises ValueError if the group does not divide by `num_stages`."""
        if group.size % num_stages:
            raise ValueError(f"{group.size} ranks do not divide among {num_stages} stages")
        shape = _shape(group, num_stages)
        stage = shape.stage_of(group.rank)
        context = ZmqContext()
        receiver, address = None, ""
        if stage > 0:
            receiver = _socket(context, zmq.PULL, group.own_host)
            host = f"[{group.own_host}]" if ":" in group.own_host else group.own_host
            address = f"tcp://{host}:{receiver.bind_to_random_port(f'tcp://{host}')}"
        addresses = group.all_texts(address)
        sender = None
        if stage < num_stages - 1:
            next_address = addresses[shape.rank_in(stage + 1, group.rank % shape.size)]
            sender = _socket(context, zmq.PUSH, next_address)
            sender.connect(next_address)
        group.on_close(context.close)
        return cls(group, num_stages, receiver, sender)

    def send(self, hidden: torch.Tensor) -> None:
        """Sends hidden states to the next stage. They must not change afterwards. Does not wait for that stage."""
        content = hidden.detach().contiguous().cpu().view(torch.uint8).numpy()
        self._num_sent += 1
        number = self._num_sent.to_bytes(_NUMBER_BYTES, "little")
        self._sender.send_multipart([number, content.reshape(-1).data], copy=False)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next hidden states of the stage before, in host memory. Raises RankLost if this rank has left the group,
        or the stages are out of step."""
        began = time.perf_counter()
        while not self._receiver.poll(_POLL_MS):
            if self.group.has_left:
                raise RankLost(f"stage {self.stage} of {self.num_stages} has left the pipeline")
        self.waited_s += time.perf_counter() - began
        number, content = self._receiver.recv_multipart(copy=False)
        self._num_received += 1
        hidden = torch.empty(shape, dtype=dtype)
        if int.from_bytes(number.bytes, "little") != self._num_received or len(content.buffer) != hidden.nbytes:
            raise RankLost(
                f"stage {self.stage} of {self.num_stages} expected hidden states {self._num_received} of "
                f"{hidden.nbytes} bytes, and got {int.from_bytes(number.bytes, 'little')} of {len(content.buffer)}"
            )
        np.copyto(hidden.view(torch.uint8).view(-1).numpy(), np.frombuffer(content.buffer, np.uint8))
        return hidden


def _shape(group: GroupCoordinator, num_stages: int) -> ShardShape:
    return ShardShape(group.size // num_stages, 1, num_stages)


def _socket(context: ZmqContext, kind: int, address: str) -> Any:
    made = context.socket(kind)
    made.set_hwm(0)
    made.setsockopt(zmq.IPV6, int("[" in address or address.count(":") > 2))
    return made


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

    def __init__(self, link: PipelineLink, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
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
        self._embedding = [embedding]  # in a list: not registered as a submodule

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        embedding = self._embedding[0]
        received, embedding.received = embedding.received, None
        assert received is not None
        return received


class ExitLayer(AbsentModule):
    """The first layer behind the stage's own: sends the stage's output on."""

    def __init__(self, original: nn.Module, link: PipelineLink) -> None:
        super().__init__(original)
        self._link = link

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._link.send(hidden)
        return hidden


class StageHead(nn.Module):
    """The head, which only the last stage has. While `is_shared`, all stages get its logits, for the checks of a start;
    otherwise other stages get `[..., 0]`."""

    def __init__(self, head: nn.Module | None, vocab_size: int, link: PipelineLink) -> None:
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


def connect_stage(model: PreTrainedModel, plan: StagePlan, link: PipelineLink) -> StageHead:
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
