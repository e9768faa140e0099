"""The ports that a stack has open."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import psutil

from tests.fakes.stack import Stack

HEALTH_PAGES = {"KVRELAY_HTTP_PORT": "0"}
"""The environment in which `check_ports` finds the pages of both workers."""


def check_ports(stack: Stack) -> None:
    """Nothing listens beyond loopback, after a request that opened all connections."""
    stack.complete([5, 6, 7], 3)
    ports = open_ports(stack.process.pid)
    assert len(ports) >= 8  # HTTP, Redis, three inboxes, decode's for blocks, and two health pages
    assert [port for port in ports if not ip_address(port[0]).is_loopback] == []


def open_ports(pid: int) -> list[tuple[str, int]]:
    """Where a process and its children listen, TCP and UDP."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = []
    for process in family:
        for connection in process.net_connections("inet"):
            is_udp = connection.type == socket.SOCK_DGRAM
            if connection.status == psutil.CONN_LISTEN or (is_udp and not connection.raddr):
                found.append((connection.laddr.ip, connection.laddr.port))
    return found
