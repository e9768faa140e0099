"""The transports that ranks open, and those that a worker of several ranks offers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest

from kvrelay.config.ranks import RankConfig
from kvrelay.ranks.transfer_messages import TransferCall, TransferReport, TransferSettings
from kvrelay.transfer.base import PartReceiver, PartSender, TransferReceiver, TransferSender
from kvrelay.transfer.endpoints import Endpoint
from kvrelay.transfer.nixl_transport import NixlReceiver, NixlSender, TransportUnavailable
from kvrelay.transfer.zmq_transport import ZmqReceiver, ZmqSender
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.rank_main import ADMISSION_WAIT_S, host_of_senders, make_transports
from kvrelay.worker.ranked_transfers import (
    other_ranks_identities,
    with_other_ranks_receivers,
    with_other_ranks_senders,
)
from tests.component.transfer.transports import NO_NIXL, without_nixl

pytestmark = pytest.mark.component
needs_nixl = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
CONFIG = RankConfig(engine="127.0.0.1:7000", rank=1, host="127.0.0.1")


def pool() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((8, 64), np.uint8)


def opened(
    role: Literal["prefill", "decode"], choice: Literal["auto", "nixl", "zmq"]
) -> Mapping[str, PartSender | PartReceiver]:
    return make_transports(CONFIG, TransferSettings(role, choice, checksums=True, max_peers=8), pool())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("choice", "names"), [("auto", ["nixl", "zmq"]), ("nixl", ["nixl"]), ("zmq", ["zmq"])])
@needs_nixl
def test_a_rank_opens_what_its_worker_was_given(
    role: Literal["prefill", "decode"], choice: Literal["auto", "nixl", "zmq"], names: list[str]
) -> None:
    transports = opened(role, choice)
    assert list(transports) == names
    for transport in transports.values():
        if isinstance(transport, NixlReceiver | ZmqReceiver):
            assert transport._admission_wait_s == ADMISSION_WAIT_S
        transport.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_without_nixl(role: Literal["prefill", "decode"], monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    transports = opened(role, "auto")
    assert list(transports) == ["zmq"]
    transports["zmq"].close()
    with pytest.raises(TransportUnavailable, match="NIXL is not installed"):
        opened(role, "nixl")


class Calls:
    """Ranks with these transports, which are never called."""

    def __init__(self, *ranks: Sequence[str]) -> None:
        self._endpoints = [
            {name: {"rank": str(rank), "name": name} for name in names} for rank, names in ranks_of(ranks)
        ]
        self.identities = [f"machine/{rank}/1" for rank in range(1, 1 + len(ranks))]

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        return self._endpoints[rank - 1]

    def publish_call(self, rank: int, call: TransferCall) -> None:
        raise AssertionError

    def on_report(self, rank: int, transport: str, handle: Callable[[TransferReport], None]) -> None:
        raise AssertionError


def ranks_of(ranks: Sequence[Sequence[str]]) -> list[tuple[int, Sequence[str]]]:
    return list(enumerate(ranks, 1))


def context_of(calls: Calls | None) -> WorkerContext:
    spec = SimpleNamespace(
        tensor_parallel_size=3,
        pipeline_parallel_size=1,
        total_kv_heads=3,
        num_kv_heads=1,
        total_layers=2,
        num_layers=2,
        block_bytes=64,
    )
    ranks = None if calls is None else SimpleNamespace(calls=calls)
    return cast(WorkerContext, SimpleNamespace(spec=spec, ranks=ranks))


@needs_nixl
def test_a_worker_offers_the_transports_that_all_of_its_ranks_have(caplog: pytest.LogCaptureFixture) -> None:
    every, lacking = Calls(["nixl", "zmq"], ["nixl", "zmq"]), Calls(["nixl", "zmq"], ["zmq"])
    for calls, names in ((every, ["nixl", "zmq"]), (lacking, ["zmq"])):
        senders: dict[str, TransferSender] = {"nixl": NixlSender(pool()), "zmq": ZmqSender(pool())}
        receivers: dict[str, TransferReceiver] = {"nixl": NixlReceiver(pool()), "zmq": ZmqReceiver(pool())}
        offered = with_other_ranks_senders(senders, context_of(calls))
        taken = with_other_ranks_receivers(receivers, context_of(calls))
        assert list(offered) == list(taken) == names
        for name, receiver in taken.items():
            own, *others = receiver.endpoints  # type: ignore[union-attr]
            assert own == receivers[name].endpoint
            assert others == [{"rank": str(rank), "name": name} for rank in (1, 2)]
            assert receiver.is_one_sided == (name == "nixl")
        assert (receivers["nixl"]._agent._agent is None) == (calls is lacking)  # type: ignore[attr-defined]
        for end in (*offered.values(), *taken.values()):
            for rank_0 in end._ranks[:1]:  # type: ignore[union-attr]
                rank_0.close()
    assert "KV blocks do not travel by nixl: it does not work on rank 2, whose log says why" in caplog.text


def test_reserve_names_the_processes_of_all_ranks() -> None:
    assert other_ranks_identities(context_of(None)) == []
    assert other_ranks_identities(context_of(Calls(["zmq"], ["zmq"]))) == ["machine/1/1", "machine/2/1"]


def test_nixl_of_a_prefill_rank_listens_where_the_worker_is_reached() -> None:
    assert host_of_senders(RankConfig(engine="127.0.0.1:7000", rank=1)) == "127.0.0.1"
    assert host_of_senders(RankConfig(engine="[::1]:7000", rank=1, host="10.1.2.3")) == "10.1.2.3"
    own = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in own:
        assert host_of_senders(RankConfig(engine=f"{address}:7000", rank=1)) == address
