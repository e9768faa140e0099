"""Which transports a worker gets for what its configuration says."""

from __future__ import annotations

import pytest

from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.handoff.transports.nixl_agent import TransportUnavailable
from kvrelay.handoff.transports.select import TransferChoice, make_receivers, make_senders
from tests.component.transfer.transports import NO_NIXL, source_pool, target_pool, without_nixl

pytestmark = pytest.mark.component


def names(choice: TransferChoice, ucx_transports: str = "") -> tuple[list[str], list[str]]:
    senders: dict[str, TransferSender] = make_senders(choice, source_pool(4, 1024), ucx_transports=ucx_transports)
    receivers: dict[str, TransferReceiver] = {}
    try:
        receivers = make_receivers(
            choice,
            target_pool(4, 1024),
            host="127.0.0.1",
            port=0,
            advertise_host=None,
            ucx_transports=ucx_transports,
        )
        return list(senders), list(receivers)
    finally:
        for sender in senders.values():
            sender.close()
        for receiver in receivers.values():
            receiver.close()


@pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
@pytest.mark.parametrize(("choice", "made"), [("auto", ["nixl", "zmq"]), ("nixl", ["nixl"])])
def test_nixl_comes_first_where_it_works(choice: TransferChoice, made: list[str]) -> None:
    assert names(choice) == (made, made)


def test_zmq_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    assert names("zmq") == (["zmq"], ["zmq"])


def test_auto_does_without_nixl_and_asking_for_it_by_name_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    assert names("auto") == (["zmq"], ["zmq"])
    with pytest.raises(TransportUnavailable, match="install the extra"):
        names("nixl")


@pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
def test_auto_does_without_nixl_where_ucx_cannot_start() -> None:
    assert names("auto", "no_such_transport") == (["zmq"], ["zmq"])
