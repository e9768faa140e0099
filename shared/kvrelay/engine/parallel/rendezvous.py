"""How the processes of a group find each other: rank 0 listens, and all come to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as torch_distributed

dist: Any = torch_distributed  # its names come from C++ and are not declared as exported
_CONNECT_INTERVAL_S = 0.05


class GroupNotFormed(RuntimeError):
    """Ranks did not come, or the address cannot be used. The message names them."""


def meet(
    rank: int,
    size: int | None,
    address: tuple[str, int],
    timeout_s: float,
    *,
    listener: socket.socket | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Any, int]:
    """Returns the group's store and size once all ranks have come. Rank 0 states the size. See
    `GroupCoordinator.connect`.

    Raises:
        GroupNotFormed: after `timeout_s` some ranks are missing, or the address is taken.
    """
    host, port = address
    store = _open_store(rank, host, port, timeout_s, listener)
    if rank == 0:
        store.set("size", str(size))
    size = int(store.get("size"))
    if rank >= size:
        raise GroupNotFormed(f"there is no rank {rank} in a group of {size} (allowed: 1 to {size - 1})")
    if store.add(f"rank {rank}", 1) > 1:
        raise GroupNotFormed(f"there is a rank {rank} at {host}:{port} already")
    keys, deadline = [f"rank {each}" for each in range(size)], time.monotonic() + timeout_s
    while not store.check(keys) and time.monotonic() < deadline:
        check()
        time.sleep(_CONNECT_INTERVAL_S)
    if not store.check(keys):
        missing = [str(each) for each in range(size) if not store.check([f"rank {each}"])]
        raise GroupNotFormed(
            f"of {size} ranks, {', '.join(missing)} did not come to {host}:{port} within {timeout_s:g} s "
            f"(rank_timeout_s)"
        )
    return store, size


def _open_store(rank: int, host: str, port: int, timeout_s: float, listener: socket.socket | None) -> Any:
    """Rank 0's store, or a connection to it. Raises GroupNotFormed."""
    options = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    try:
        if rank:
            _await_listener(host, port, timeout_s)
            return dist.TCPStore(host, port, is_master=False, **options)
        if listener is None:  # torch would listen on all addresses of the machine
            listener = socket.create_server((host, port), family=family_of(host))
        return dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)
    except (OSError, RuntimeError) as error:
        what = f"found no rank 0 at {host}:{port} within {timeout_s:g} s" if rank else f"cannot listen on {host}:{port}"
        raise GroupNotFormed(f"rank {rank} {what}: {first_line(error)}") from None


def _await_listener(host: str, port: int, timeout_s: float) -> None:
    """Returns once something listens there. Raises OSError.

    The store would do the same, but fills the log with its attempts.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_CONNECT_INTERVAL_S)


def host_towards(host: str) -> str:
    """This machine's address towards a host; a loopback address is itself."""
    if _is_loopback(host):
        return host
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # chooses the route and sends nothing
        address: str = probe.getsockname()[0]
    return address


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def family_of(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)[0][0]


def make_gloo(store: Any, rank: int, size: int, own_host: str) -> Any:
    """Connects CPUs. `own_host`: the address of this machine at which the other ranks reach it."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    # Without this, gloo listens on the address of the machine's name.
    options._devices = [gloo.create_device(hostname=own_host)]
    options._timeout = timedelta(seconds=store.timeout.total_seconds())
    return gloo(dist.PrefixStore("gloo", store), rank, size, options)


def make_nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Connects GPUs. Raises GroupNotFormed."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise GroupNotFormed(f"this torch ({torch.__version__}) has no NCCL, which GPUs need")
    torch.cuda.set_device(device)
    return nccl(dist.PrefixStore("nccl", store), rank, size, nccl.Options())


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
