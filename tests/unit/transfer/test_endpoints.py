"""How receivers are named and reached."""

from __future__ import annotations

import pytest

from kvrelay.handoff.transports.base import MalformedEndpoint
from kvrelay.handoff.transports.zmq_receiver import choose_address, local_address
from kvrelay.messaging.zmq_context import tcp_address

pytestmark = pytest.mark.unit

LOCAL = local_address()
ENDPOINT = {"address": "tcp://10.0.0.7:5555", "local": LOCAL, "machine": "m1"}


def test_a_receiver_on_this_machine_is_reached_locally() -> None:
    assert choose_address(ENDPOINT, "m1") == LOCAL


@pytest.mark.parametrize("own_machine", ["m2", None])
def test_any_other_is_reached_over_tcp(own_machine: str | None) -> None:
    assert choose_address(ENDPOINT, own_machine) == "tcp://10.0.0.7:5555"


@pytest.mark.parametrize(("host", "address"), [("decode-1.svc", "tcp://decode-1.svc:80"), ("::1", "tcp://[::1]:80")])
def test_hosts_of_all_kinds_make_addresses(host: str, address: str) -> None:
    assert tcp_address(host, 80) == address
    assert choose_address({"address": address}, None) == address


@pytest.mark.parametrize(
    "endpoint",
    [
        {},
        {"address": "10.0.0.7:5555"},
        {"address": "tcp://10.0.0.7"},
        {"address": "tcp://10.0.0.7:0"},
        {"address": "tcp://10.0.0.7:65536"},
        {"address": "tcp://*:80"},
        {"address": "tcp://a b:80"},
        {"address": "ipc:///tmp/socket"},
        {"address": "inproc://name"},
        {"address": "tcp://h:80", "machine": "m1"},
        {"address": "tcp://h:80", "machine": "m1", "local": "ipc:///tmp/socket"},
        {"address": "tcp://h:80", "machine": "m1", "local": "tcp://h:81"},
    ],
)
def test_anything_else_is_malformed(endpoint: dict[str, str]) -> None:
    with pytest.raises(MalformedEndpoint):
        choose_address(endpoint, "m1")
