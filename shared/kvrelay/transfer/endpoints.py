"""How a sender reaches a receiver: by a TCP address, or within one machine by a Unix socket, which is faster."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")
_TCP_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]*;]+):([0-9]{1,5})")
_LOCAL_ADDRESS = re.compile(r"ipc://@[\w.-]{1,90}")

Endpoint = dict[str, str]


class Unreachable(Exception):
    """A push to this receiver cannot be made. The message has the cause."""


class MalformedEndpoint(Unreachable, ValueError):
    """The endpoint of a receiver has missing or invalid fields."""


def machine_id() -> str | None:
    """The same for all processes that can reach each other's abstract sockets; None where there are none."""
    try:
        parts = _BOOT_ID.read_text().strip() + str(_NETWORK_NAMESPACE.readlink())
    except OSError:
        return None
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def local_address() -> str:
    """A fresh address in the abstract namespace: it needs no file and is gone with its process."""
    return f"ipc://@kvrelay-{secrets.token_hex(12)}"


def tcp_address(host: str, port: int | str) -> str:
    """Brackets an IPv6 address as ZMQ wants it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def choose_address(endpoint: Mapping[str, str], own_machine: str | None) -> str:
    """The address to connect to: the local one if the receiver is on this machine. Raises MalformedEndpoint."""
    address = endpoint.get("address", "")
    match = _TCP_ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise MalformedEndpoint(f"the endpoint's address {address!r} is not tcp://host:port")
    if own_machine is None or endpoint.get("machine") != own_machine:
        return address
    local = endpoint.get("local", "")
    if _LOCAL_ADDRESS.fullmatch(local) is None:
        raise MalformedEndpoint(f"the endpoint's local address {local!r} is not of this transport")
    return local
