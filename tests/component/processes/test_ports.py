"""Ports that are held for servers that start later."""

from __future__ import annotations

import socket

import pytest

from kvrelay.process import HeldPort


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_held_port_refuses_connections_until_its_server_listens_and_after_it_stopped(host: str) -> None:
    with HeldPort(host) as held:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", held.port))
            with socket.create_server((host, held.port)) as server:
                socket.create_connection(("127.0.0.1", held.port)).close()
                server.accept()[0].close()


def test_nobody_is_given_a_held_port_who_does_not_know_of_it() -> None:
    with HeldPort() as held, socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", held.port))


def test_a_port_on_which_somebody_listens_cannot_be_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="Address already in use"):
        HeldPort(port=server.getsockname()[1])
