"""The connections of a pipeline's stage to the stages beside it, which carry hidden states.

Messages go over ZMQ from host memory to host memory. A send does not wait, and what has come is received while the
stage still computes, so a stage waits only if the one before it has not ended. One thread at a time uses a link.
"""

from __future__ import annotations

import time
from typing import Any, Self

import numpy as np
import torch
import zmq

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, RankLost
from kvrelay.kv.shard_map import ShardShape
from kvrelay.messaging.zmq_context import ZmqContext

_POLL_MS = 100
"""Time between looks at whether this rank has left while it waits for the stage before."""
_NUMBER_BYTES = 8


class StageLink:
    """A rank's link. If a stage has several ranks, each is linked to those of the same number in the stages beside it.
    `waited_s`: seconds that it has waited for hidden states."""

    def __init__(self, group: GroupCoordinator, num_stages: int, receiver: Any, sender: Any) -> None:
        """`group` has the ranks of all stages. `receiver` and `sender` are None where there is no stage before or
        behind."""
        self.group = group
        self.num_stages = num_stages
        self.stage = _shape(group, num_stages).stage_of(group.rank)
        self.waited_s = 0.0
        self._receiver, self._sender = receiver, sender
        self._num_received = self._num_sent = 0

    @classmethod
    def connect(cls, group: GroupCoordinator, num_stages: int) -> Self:
        """Connects the stages, among which a group's ranks are divided as `ShardShape` says. All call it at the same
        time.

        Raises:
            ValueError: the group does not divide by `num_stages`.
            RankLost: another rank is gone.
        """
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
        """The next hidden states of the stage before, in host memory.

        Raises:
            RankLost: this rank has left the group, or the stages are out of step.
        """
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
