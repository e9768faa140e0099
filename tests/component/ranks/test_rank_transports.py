"""The transports that ranks open, and those that a worker of several ranks offers."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest

from kvrelay.config.ranks import RankConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.handoff.transports.base import Endpoint, TransferReceiver, TransferSender
from kvrelay.handoff.transports.nixl_agent import TransportUnavailable
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import ZmqSender
from kvrelay.ranks.launch import ADMISSION_WAIT_S, PRIVATE_FIELDS, config_of_rank, make_transports
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.transfers import with_other_ranks_receivers, with_other_ranks_senders
from kvrelay.step.batch import ModelSpec
from tests.component.transfer.transports import NO_NIXL, without_nixl

pytestmark = pytest.mark.component
needs_nixl = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)


def pool() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((8, 64), np.uint8)


def opened(
    role: Literal["prefill", "decode"], choice: Literal["auto", "nixl", "zmq"]
) -> Mapping[str, TransferSender | TransferReceiver]:
    config = WorkerConfig(role=role, transfer=choice, transfer_checksums=True, max_peers=8)
    return make_transports(config, pool())


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

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        return self._endpoints[rank - 1]


def ranks_of(ranks: Sequence[Sequence[str]]) -> list[tuple[int, Sequence[str]]]:
    return list(enumerate(ranks, 1))


SPEC = cast(
    ModelSpec,
    SimpleNamespace(
        tensor_parallel_size=3,
        pipeline_parallel_size=1,
        total_kv_heads=3,
        num_kv_heads=1,
        total_layers=2,
        num_layers=2,
        block_bytes=64,
    ),
)


@needs_nixl
def test_a_worker_offers_the_transports_that_all_of_its_ranks_have(caplog: pytest.LogCaptureFixture) -> None:
    every, lacking = Calls(["nixl", "zmq"], ["nixl", "zmq"]), Calls(["nixl", "zmq"], ["zmq"])
    for calls, names in ((every, ["nixl", "zmq"]), (lacking, ["zmq"])):
        senders: dict[str, TransferSender] = {"nixl": NixlSender(pool()), "zmq": ZmqSender(pool())}
        receivers: dict[str, TransferReceiver] = {"nixl": NixlReceiver(pool()), "zmq": ZmqReceiver(pool())}
        offered = with_other_ranks_senders(senders, SPEC, cast(RankGroup, calls))
        taken = with_other_ranks_receivers(receivers, SPEC, cast(RankGroup, calls))
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


# -- the configuration of a rank --------------------------------------------------------------------------------------


def host_of(engine: str, role: str = "prefill", **own: Any) -> str:
    return config_of_rank(RankConfig(engine=engine, rank=1, **own), sent({"role": role})).host


def sent(settings: dict[str, Any]) -> dict[str, Any]:
    """As rank 0 sends its settings."""
    worker = WorkerConfig.model_validate({"model": "model", "tensor_parallel_size": 2, **settings})
    told: dict[str, Any] = json.loads(json.dumps(worker.model_dump(mode="json", exclude=PRIVATE_FIELDS)))
    return told


def test_nixl_of_a_prefill_rank_listens_where_the_worker_is_reached() -> None:
    assert host_of("127.0.0.1:7000") == "127.0.0.1"
    assert host_of("[::1]:7000", host="10.1.2.3") == "10.1.2.3"
    own = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in own:
        assert host_of(f"{address}:7000") == address
        assert host_of(f"{address}:7000", role="decode") == "127.0.0.1"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "sizes", [{}, {"kv_memory_bytes": "64MiB", "swap_space": "16MiB"}, {"memory_utilization": 0.5}]
)
def test_sizes_of_pools_reach_the_ranks(role: str, sizes: dict[str, Any]) -> None:
    given = {"role": role, "redis_url": "redis://:secret@redis/0", **sizes}
    worker = WorkerConfig.model_validate({"model": "model", "tensor_parallel_size": 2, **given})
    assert "secret" not in json.dumps(sent(given))
    config = config_of_rank(RankConfig(engine="127.0.0.1:7000", rank=1, threads=3, model="there"), sent(given))
    assert (config.model, config.threads) == ("there", 3)
    for name in ("role", "num_blocks", "kv_memory_bytes", "pool_sizing", "swap_bytes", "block_size", "num_ranks"):
        assert getattr(config, name) == getattr(worker, name)
