"""A typed wrapper around the part of NIXL (https://github.com/ai-dynamo/nixl, UCX backend) that this transport needs.

The library is imported only when an agent is made: it loads 60 MB of shared objects.

Facts about NIXL 1.5: descriptors of a prepared list that are neighbours on both sides, in list order, become one write
(a request made in one go, by `initialize_xfer`, is not merged). Within one machine a write is one `process_vm_writev`
per descriptor (UCX's `cma`), made inside `post` by the posting thread. A handle that is released while its write is in
flight says ok, and the data lands all the same."""

from __future__ import annotations

import fcntl
import importlib
import ipaddress
import logging
import logging.config
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.config.common import is_wildcard
from kvrelay.handoff.transports.base import Endpoint, MalformedEndpoint, Unreachable
from kvrelay.handoff.transports.pool_memory import BlockPart, PoolLike, Segment, as_pool
from kvrelay.handoff.transports.wire import Indices

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""`nixl` chooses one of the others by the CUDA version; any of them works on the CPU."""
_BACKENDS = ["UCX"]
_UCX_DEFAULTS = {"UCX_TCP_CONN_NB": "y"}
"""By default UCX connects with a blocking `connect`. If no answer comes (a machine without power, a firewall, a full
accept queue), it blocks the thread of all peers for 127 s. Variables in the environment take precedence."""
_PORTS = "UCX_TCP_PORT_RANGE"


class TransportUnavailable(RuntimeError):
    """This transport cannot work in this process; the text says why and what to do."""


class NixlError(Unreachable):
    """NIXL refused a call, or the other side is gone."""


@dataclass(frozen=True, slots=True)
class Region:
    """A pool in the memory of its own process, or of one of its devices."""

    address: int
    num_blocks: int
    block_bytes: int
    segment: Segment = "DRAM"
    device_id: int = 0

    @staticmethod
    def of(memory: PoolLike) -> Region:
        """The memory region of a pool. Raises ValueError for an array that is no pool."""
        pool = as_pool(memory)
        return Region(pool.address, pool.num_blocks, pool.block_bytes, pool.segment, pool.device_id)

    def descriptors(self, part: BlockPart | None = None) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """One per block, or one per row of each block's part, [descriptors, 3]: address, length, device."""
        addresses = self.addresses(np.arange(self.num_blocks), part)
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = self.block_bytes if part is None else part.num_bytes
        rows[:, 2] = self.device_id
        return rows

    def addresses(self, blocks: Indices, part: BlockPart | None = None) -> NDArray[np.uint64]:
        """Returns the addresses of these blocks, or of the rows of each block's part."""
        starts = np.uint64(self.address) + blocks.astype(np.uint64) * np.uint64(self.block_bytes)
        if part is None:
            return starts
        within = (part.first_row + np.arange(part.num_rows, dtype=np.uint64)) * np.uint64(part.row_bytes)
        addresses: NDArray[np.uint64] = (starts[:, None] + within + np.uint64(part.first_byte)).reshape(-1)
        return addresses


@dataclass(slots=True, eq=False)
class Write:
    """A posted write. `done`: whether posting already completed it."""

    handle: Any
    done: bool


class NixlAgent:
    """One agent with one registered pool. Not thread-safe: one thread at a time calls it.

    `ucx_transports` and `ucx_devices` become UCX_TLS and UCX_NET_DEVICES ("" leaves them as they are). UCX has no
    thread of its own here: it works while `post`, `poll` and `notifications` are called, which transports need that
    copy on the receiving side. Its progress thread made both ends slower and less even where cores are shared. Raises
    TransportUnavailable.
    """

    def __init__(self, region: Region, *, ucx_transports: str = "", ucx_devices: str = "") -> None:
        api = import_api()
        given = {"UCX_TLS": ucx_transports, "UCX_NET_DEVICES": ucx_devices}
        self.name = f"kvrelay-{secrets.token_hex(12)}"
        _check_ports(ucx_devices or os.environ.get(VARIABLE, ""))
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = api.nixl_agent(self.name, config)
            with _environment(_unset(_UCX_DEFAULTS) | given):
                self._agent.create_backend("UCX")
            pool = (region.address, region.num_blocks * region.block_bytes, region.device_id, "")
            self._registered = self._agent.register_memory([pool], region.segment, _BACKENDS)
        except Exception as error:  # NIXL's errors have no base of their own
            effective = {name: given.get(name) or os.environ.get(name, "") for name in (*given, _PORTS)}
            asked = "".join(f" with {name}={value}" for name, value in effective.items() if value)
            raise TransportUnavailable(f"NIXL cannot start UCX{asked}: {error!r}") from error

    def metadata(self) -> bytes:
        """What another agent needs to reach this one's pool; about 500 bytes, more where there are network cards."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Returns the peer's name. Raises NixlError."""
        with _errors("metadata"):
            return _text(self._agent.add_remote_agent(metadata))

    def forget_peer(self, name: str) -> None:
        """Disconnects. A peer that is gone already is no error."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise NixlError(f"disconnecting: {error}") from error

    def prepare(self, region: Region, peer: str = "", part: BlockPart | None = None) -> Any:
        """Descriptors of all blocks, or of their parts, of a peer's pool or of one's own. Raises NixlError."""
        with _errors("descriptors"):
            return self._agent.prep_xfer_dlist(peer, region.descriptors(part), region.segment, _BACKENDS)

    def discard(self, prepared: Any) -> None:
        """Gives prepared descriptors back."""
        prepared.release()

    def post(self, own: Any, sources: Indices, theirs: Any, slots: Indices, notification: bytes) -> Write:
        """Begins to write what the prepared descriptors with these numbers name. May block for the whole copy,
        without the GIL. Raises NixlError.

        The notification reaches the peer after all of the data.
        """
        with _errors("posting"):
            handle = self._agent.make_prepped_xfer(
                "WRITE", own, sources.astype(np.int32), theirs, slots.astype(np.int32), notification, _BACKENDS
            )
            return Write(handle, self._is_done(self._agent.transfer(handle)))

    def poll(self, write: Write) -> bool:
        """Whether the write is complete at the peer. Raises NixlError: it ended, and no more of it will land."""
        with _errors("writing"):
            write.done = write.done or self._is_done(self._agent.check_xfer_state(write.handle))
        return write.done

    def end(self, write: Write) -> None:
        """Gives the handle of a write back that is complete or failed."""
        with suppress(Exception):  # NIXL may raise the error of a failed write again
            write.handle.release()

    def notifications(self) -> list[bytes]:
        """Returns notifications since the last call. Raises NixlError."""
        with _errors("notifications"):
            news = self._agent.get_new_notifs()
        return [bytes(note) for notes in news.values() for note in notes]

    def close(self) -> None:
        """Ends the agent. Its connections go with the last reference to it."""
        agent, self._agent = self._agent, None
        if agent is not None:
            with _errors("closing"):
                agent.deregister_memory(self._registered, _BACKENDS)

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise NixlError("the write failed")
        return state == "DONE"


def import_api() -> Any:
    """NIXL's Python module. Raises TransportUnavailable."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it would log to stdout
    causes = []
    with _logging_kept():
        for package in PACKAGES:
            try:
                return importlib.import_module(f"{package}._api")
            except ImportError as error:
                causes.append(str(error))
    raise TransportUnavailable(f"NIXL is not installed ({'; '.join(causes)}): install the extra `nixl`")


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Keeps the process's logging as it is. NIXL 1.5 configures it when it is imported, by `dictConfig`, which closes
    all handlers: those that write on a thread write nothing more, and none is flushed at the end of the process."""
    configure, raises = logging.config.dictConfig, logging.raiseExceptions

    def ignore(config: Mapping[str, Any]) -> None:
        """Replaces `dictConfig`."""

    logging.config.dictConfig = ignore
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raises


def _unset(values: Mapping[str, str]) -> dict[str, str]:
    """The variables that the environment does not have."""
    return {name: value for name, value in values.items() if name not in os.environ}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are not "". UCX takes lists from the environment only: NIXL's own `engine_config` splits at
    commas."""
    given = {name: value for name, value in values.items() if value}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """NIXL's errors have no base of their own, and their text is a code."""
    try:
        yield
    except NixlError:
        raise
    except Exception as error:
        raise NixlError(f"{what}: {type(error).__name__}: {error}") from error


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


class NixlEndpoint(msgspec.Struct, frozen=True):
    """The receiver's agent, which has another name after every start, its metadata, and where its pool lies.

    `process`: the identity of its process; empty if unknown.
    """

    agent: str
    metadata: bytes
    region: Region
    process: str = ""

    def encode(self) -> Endpoint:
        """Encodes the endpoint for `Granted`."""
        return {"nixl": msgspec.json.encode(self).decode()}

    @staticmethod
    def decode(words: Mapping[str, str]) -> NixlEndpoint:
        """Raises MalformedEndpoint."""
        try:
            return msgspec.json.decode(words.get("nixl", ""), type=NixlEndpoint)
        except msgspec.MsgspecError as error:
            raise MalformedEndpoint(f"no endpoint of a NIXL receiver: {error}") from error


log = logging.getLogger(__name__)

VARIABLE = "UCX_NET_DEVICES"
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 40
_FIRST_ADDRESS = slice(20, 24)  # of `struct ifreq`: the name (16), then a sockaddr_in (family, port, address)


def devices_for(host: str | None, advertise_host: str | None = None) -> str:
    """The value of UCX_NET_DEVICES for a worker that listens at `host`; "" if UCX may use all devices.

    A loopback address gives the loopback device alone; another address excludes all interfaces but its own, so that
    RDMA devices remain. A wildcard stands for the interface of `advertise_host`, and for all if that is on none.
    UCX_NET_DEVICES in the environment takes precedence. Raises TransportUnavailable if no device has the address of
    `host` as its first one.
    """
    if host is None or is_wildcard(host):
        return _devices_of_wildcard(advertise_host)
    if chosen := os.environ.get(VARIABLE):
        log.warning("NIXL listens on the devices of %s=%s, whatever their addresses, not at %s", VARIABLE, chosen, host)
        return ""
    wanted, first = _addresses_of(host), _first_addresses()
    if any(_is_loopback(address) for address in wanted):
        found = next((name for name, address in first.items() if _is_loopback(address)), None)
    else:
        found = _all_but(wanted, first)
    if found is None:
        raise TransportUnavailable(
            f"UCX cannot listen at {host} alone: no network device has it as its first IPv4 address. Set {VARIABLE} to "
            f"the devices that NIXL may use"
        )
    return found


def _devices_of_wildcard(advertise_host: str | None) -> str:
    if advertise_host is None or os.environ.get(VARIABLE):
        return ""
    try:
        # Debian resolves the machine's own name to a loopback address, at which no other machine reaches it.
        wanted = {address for address in _addresses_of(advertise_host) if not _is_loopback(address)}
    except TransportUnavailable:
        wanted = set()
    devices = _all_but(wanted, _first_addresses())
    if devices is None:
        log.warning(
            "NIXL uses all network devices, since none has the address of %s, which is advertised to peers. Set %s or "
            "an address as --host to restrict it",
            advertise_host,
            VARIABLE,
        )
    return devices or ""


def _all_but(wanted: set[str], first: Mapping[str, str]) -> str | None:
    """The exclusion of all devices without a wanted address. None if no device has one."""
    others = sorted(name for name, address in first.items() if address not in wanted)
    if len(others) == len(first):
        return None
    return f"^{','.join(others)}" if others else ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _check_ports(devices: str) -> None:
    """Raises TransportUnavailable if a device has no free port in UCX_TCP_PORT_RANGE: UCX would try forever. `devices`:
    as in UCX_NET_DEVICES."""
    first, _, last = os.environ.get(_PORTS, "").partition("-")
    if not (first.isdecimal() and last.isdecimal()):  # a single port, or what UCX refuses, does not hang
        return
    named = set(devices.removeprefix("^").split(","))
    for name, address in _first_addresses().items():
        is_used = not devices or (name in named) != devices.startswith("^")
        if is_used and not any(_is_free(address, port) for port in range(int(first), int(last) + 1)):
            raise TransportUnavailable(
                f"NIXL has no port: all of {_PORTS}={first}-{last} are taken at {address} ({name}). Each process of "
                f"this machine or pod needs one: widen the range"
            )


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as UCX does
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _addresses_of(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportUnavailable(f"the address of {host!r} is not known: {error}") from error
    return {str(info[4][0]).partition("%")[0] for info in found}


def _first_addresses() -> dict[str, str]:
    """By device, for those that have one."""
    return {name: address for _, name in socket.if_nameindex() if (address := _first_address(name))}


def _first_address(device: str) -> str | None:
    """The IPv4 address that UCX would use. None for a device without one."""
    request = struct.pack(f"{_IFREQ_BYTES}s", device.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_FIRST_ADDRESS])
