"""Which network devices UCX may use, so that NIXL listens at the address that a worker was given and nowhere else.

Every UCX process listens on each TCP device it may use, at the device's first IPv4 address. UCX takes names of devices,
not addresses (`UCX_NET_DEVICES`).
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct

from kvrelay.config.common import is_wildcard
from kvrelay.transfer.nixl_agent import TransportUnavailable

log = logging.getLogger(__name__)

VARIABLE = "UCX_NET_DEVICES"
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 40
_FIRST_ADDRESS = slice(20, 24)  # of `struct ifreq`: the name (16), then a sockaddr_in (family, port, address)


def devices_for(host: str | None) -> str:
    """The value of UCX_NET_DEVICES for a worker that listens at `host`; "" if UCX may use all devices.

    A loopback address gives the loopback device alone; another address excludes all interfaces but its own, so that
    RDMA devices remain. A wildcard, or UCX_NET_DEVICES in the environment, changes nothing. Raises TransportUnavailable
    if no device has this address as its first one.
    """
    if host is None or is_wildcard(host):
        return ""
    if chosen := os.environ.get(VARIABLE):
        log.warning("NIXL listens on the devices of %s=%s, whatever their addresses, not at %s", VARIABLE, chosen, host)
        return ""
    wanted = _addresses_of(host)
    first = {name: address for _, name in socket.if_nameindex() if (address := _first_address(name))}
    if any(ipaddress.ip_address(address).is_loopback for address in wanted):
        found = [name for name, address in first.items() if ipaddress.ip_address(address).is_loopback]
        if found:
            return found[0]
    else:
        found = [name for name, address in first.items() if address in wanted]
        others = sorted(set(first) - set(found))
        if found:
            return f"^{','.join(others)}" if others else ""
    raise TransportUnavailable(
        f"UCX cannot listen at {host} alone: no network device has it as its first IPv4 address. Set {VARIABLE} to the "
        f"devices that NIXL may use"
    )


def _addresses_of(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportUnavailable(f"the address of {host!r} is not known: {error}") from error
    return {str(info[4][0]).partition("%")[0] for info in found}


def _first_address(device: str) -> str | None:
    """The IPv4 address that UCX would use. None for a device without one."""
    request = struct.pack(f"{_IFREQ_BYTES}s", device.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_FIRST_ADDRESS])
