"""The processes among which a model is divided, and the collectives between them.

Gloo connects processes on CPUs, NCCL on GPUs. Ranks of one machine sum and gather through memory that they share.
Collectives have no tags: all ranks must call the same ones in the same order, with tensors of the same shape and type.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any, Self
from urllib.parse import urlsplit

import torch
import torch.distributed as torch_distributed
from torch.nn import functional

from kvrelay.engine.parallel.shared_memory import RankEnded, RanksInC, SharedMemory, can_sum, share_memory
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.step.batch import DeviceLost

dist: Any = torch_distributed  # its names come from C++ and are not declared as exported

_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longest wait for another rank in a collective: ranks load weights at different speeds. A rank whose process ends is
noticed at once, since its connection closes."""


_CONNECT_INTERVAL_S = 0.05
_WAIT = timedelta(seconds=0.5)
"""Time between looks at whether this rank has left while it waits in a collective."""
_abandoned: list[Any] = []
"""Collectives that may never end, with their groups."""


class GroupNotFormed(RuntimeError):
    """Ranks did not come, or the address cannot be used. The message names them."""


class RankLost(DeviceLost):
    """Another rank ended or failed in a collective. The group is of no use afterwards."""


class GroupCoordinator:
    """One rank's connection to its group. Calls come from one thread at a time."""

    def __init__(self, rank: int, size: int, process_group: Any, store: Any, own_host: str) -> None:
        """`own_host`: the address of this machine at which the other ranks reach it."""
        self.rank = rank
        self.size = size
        self.own_host = own_host
        self._group = process_group
        self._store = store  # rank 0's is the server of the others' stores
        self._has_left = False
        self._shared: SharedMemory | None = None
        self._close_others: list[Callable[[], None]] = []
        self._parts: list[Self] = []

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        init_address: str,
        timeout_s: float,
        device: torch.device | None = None,
        *,
        listener: socket.socket | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Self:
        """Joins the group. Returns once all ranks have.

        `init_address` is `tcp://HOST:PORT`, and rank 0 listens on it. With a loopback address, nothing listens beyond
        loopback. `device` is the device of this rank's tensors; None: the CPU. Rank 0 may bring its `listener` at that
        address, which the group takes over. `check` is called while rank 0 waits for others, and ends that by raising.

        Raises:
            ValueError: a rank or an address that cannot be.
            GroupNotFormed: after `timeout_s` some ranks are missing, or the address is taken.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        host, port = _host_and_port(init_address)
        store = _open_store(rank, size, host, port, timeout_s, listener)
        try:
            _await_ranks(store, rank, size, init_address, timeout_s, check)
        except RuntimeError as error:
            raise _not_formed(rank, size, error) from None
        return cls._form(rank, size, store, _host_towards(host), timeout_s, device)

    @classmethod
    def _form(
        cls, rank: int, size: int, store: Any, own_host: str, timeout_s: float, device: torch.device | None
    ) -> Self:
        """Connects ranks that all have come to a store. Raises GroupNotFormed."""
        try:
            is_cuda = _is_cuda(device)
            make = partial(_make_nccl, device=device) if is_cuda else partial(_make_gloo, own_host=own_host)
            group = make(store, rank, size)
            connected = cls(rank, size, group, store, own_host)
            group.set_timeout(timedelta(seconds=timeout_s))
            connected._check_connected(device)
            group.set_timeout(_COLLECTIVE_TIMEOUT)
            if not is_cuda:
                connected._shared = share_memory(connected)
        except RuntimeError as error:
            raise _not_formed(rank, size, error) from None
        connected._timeout_s = timeout_s
        return connected

    _timeout_s = 0.0

    def divide(self, size: int) -> Self:
        """The group of those `size` neighbouring ranks of this group to which this rank belongs. Ranks are counted
        from 0 there. It is left and closed with this group. All ranks call it at the same time.

        Raises:
            ValueError: the group does not divide by `size`.
            GroupNotFormed: the ranks cannot be connected.
        """
        if self.size % size:
            raise ValueError(f"a group of {self.size} ranks does not divide into groups of {size}")
        number, rank = divmod(self.rank, size)
        store = dist.PrefixStore(f"part {number} of {size}", self._store)
        part = self._form(rank, size, store, self.own_host, self._timeout_s, self._device)
        self._parts.append(part)
        self.on_close(part.close)
        return part

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Adds all ranks' contiguous tensors, in place. The sums are the same on all ranks, bit by bit.

        Raises:
            RankLost: another rank is gone.
        """
        if self._shared is None or not can_sum(tensor):
            self._wait(lambda: self._group.allreduce([tensor]))
            return
        with self._shared_collective():
            self._shared.all_reduce(tensor, self._check_here)

    def gather_columns(self, tensor: torch.Tensor, *, to_all: bool = False) -> torch.Tensor | None:
        """The ranks' tensors `[..., columns]` side by side, on rank 0, or on all ranks. None on others.

        Raises:
            RankLost: another rank is gone.
        """
        tensor = tensor.contiguous()
        if self._shared is not None:
            with self._shared_collective():
                parts = self._shared.gather(tensor, self._check_here, is_wanted=to_all or self.rank == 0)
        elif to_all:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            self._wait(lambda: self._group.allgather([parts], [tensor]))
        else:
            options = dist.GatherOptions()
            options.rootRank = 0
            parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
            self._wait(lambda: self._group.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else None

    @property
    def shares_memory(self) -> bool:
        """Returns whether `run_in_c` is possible. The same on all ranks."""
        return self._shared is not None

    def run_in_c(self, call: Callable[[RanksInC], None]) -> None:
        """Runs C that sums over the ranks by itself, through the memory that they share.

        Raises:
            RankLost: another rank is gone.
        """
        with self._shared_collective():
            assert self._shared is not None
            self._shared.run_in_c(call, self._check_here)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, in the order of ranks. Each rank gives as many.

        Raises:
            RankLost: another rank is gone.
        """
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        found = self.gather_columns(own, to_all=True)
        assert found is not None
        every: list[list[int]] = found.view(self.size, len(numbers)).tolist()
        return every

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The `rows` `[counts[rank], columns]` of all ranks below each other, on all ranks. `counts`: of all ranks.

        Raises:
            RankLost: another rank is gone.
        """
        longest, columns = max(counts), rows.shape[-1]
        padded = functional.pad(rows, (0, 0, 0, longest - len(rows)))
        found = self.gather_columns(padded.view(-1), to_all=True)
        assert found is not None
        every = found.view(self.size, longest, columns)
        return torch.cat([every[rank, :count] for rank, count in enumerate(counts)])

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers.

        Raises:
            RankLost: another rank is gone.
        """
        return min(self._all_numbers(number))

    @contextmanager
    def in_agreement(self) -> Iterator[None]:
        """Runs a block without collectives on all ranks. If it raises on one of them, it raises on all.

        Raises:
            UnsupportedModel: another rank failed, with its error.
            RankLost: another rank is gone.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        text = b"" if failure is None else (str(failure) or type(failure).__name__).encode()
        lengths = self._all_numbers(len(text))
        if failure is not None or any(lengths):
            messages = self._all_texts(text, max(lengths))
            if failure is not None:
                raise failure
            rank = next(rank for rank, length in enumerate(lengths) if length)
            raise UnsupportedModel(f"rank {rank} of {self.size}: {messages[rank]}")

    def all_texts(self, text: str) -> list[str]:
        """The texts of all ranks.

        Raises:
            RankLost: another rank is gone.
        """
        raw = text.encode()
        return self._all_texts(raw, max(self._all_numbers(len(raw))))

    def leave(self) -> None:
        """Ends a collective in which this rank waits, now or later, with `RankLost`. Thread-safe. For a rank that is
        lost without its connection being closed. GPUs do not wait on the host, so there it does nothing."""
        self._has_left = True
        for part in self._parts:
            part.leave()

    @property
    def has_left(self) -> bool:
        return self._has_left

    def on_close(self, close: Callable[[], None]) -> None:
        """`close` is called when the connections are closed."""
        self._close_others.append(close)

    def close(self) -> None:
        """Closes the connections. Other ranks that wait for this one get `RankLost`."""
        for close in self._close_others:
            close()
        if self._shared is not None:
            self._shared.close()
        self._group = self._store = self._shared = None

    def _all_numbers(self, number: int) -> list[int]:
        return [each for (each,) in self.exchange([number])]

    def _all_texts(self, text: bytes, longest: int) -> list[str]:
        own = torch.tensor([*text, *bytes(longest - len(text))], dtype=torch.uint8, device=self._device)
        found = self.gather_columns(own, to_all=True)
        assert found is not None
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in found.view(self.size, longest)]

    _device: torch.device | None = None

    def _check_connected(self, device: torch.device | None) -> None:
        """Runs a collective, in which backends open their connections. Raises RuntimeError."""
        self._device = device
        ranks = self._all_numbers(self.rank)
        if ranks != list(range(self.size)):
            raise GroupNotFormed(f"the ranks of the group are {ranks}, not one of each")

    def _check_here(self) -> None:
        if self._group is None or self._has_left:
            raise RankLost(f"rank {self.rank} of {self.size} has left the group")

    @contextmanager
    def _shared_collective(self) -> Iterator[None]:
        """Around a collective in shared memory, which is of no use after one that did not end."""
        self._check_here()
        try:
            yield
        except BaseException as error:
            self._has_left = True
            if isinstance(error, RankEnded):
                raise RankLost(f"a rank of the {self.size} is lost to rank {self.rank}: {error}") from None
            raise

    def _wait(self, begin: Any) -> None:
        """Waits for a collective. Raises RankLost."""
        self._check_here()
        try:
            work = begin()
            if self._is_on_gpu:
                work.wait()  # with a time limit it would wait for the device
                return
            while not self._has_ended(work):
                if self._has_left:
                    self._abandon(work)
                    raise RankLost(f"rank {self.rank} of {self.size} has left the group")
        except RuntimeError as error:
            raise RankLost(f"a rank of the {self.size} is lost to rank {self.rank}: {_first_line(error)}") from error

    def _has_ended(self, work: Any) -> bool:
        """Waits for a collective for a while. Raises RuntimeError if it failed."""
        try:
            work.wait(_WAIT)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises what it failed with, unless it ended just now
        return True

    def _abandon(self, work: Any) -> None:
        """Gloo cannot cancel a collective, and freeing the group would wait for it, also when the process ends."""
        if not _abandoned:
            atexit.register(_exit_at_once)
        _abandoned.append((work, self._group))

    @property
    def _is_on_gpu(self) -> bool:
        return _is_cuda(self._device)


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tcp" or not host or not port:
        raise ValueError(f"{address!r} is no address for ranks (allowed: tcp://HOST:PORT)")
    return host, port


def _is_cuda(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _exit_at_once() -> None:
    """Ends the process without freeing what waits for a lost rank."""
    logging.shutdown()
    os._exit(1)


def _open_store(
    rank: int, size: int, host: str, port: int, timeout_s: float, listener: socket.socket | None = None
) -> Any:
    """Rank 0's store, or a connection to it. Raises GroupNotFormed."""
    timeout = timedelta(seconds=timeout_s)
    try:
        if rank:
            _await_listener(host, port, timeout_s)
            return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
        if listener is None:  # torch would listen on all addresses of the machine
            listener = socket.create_server((host, port), family=_family(host, port), backlog=size)
        fd = listener.detach()  # the store closes it
        return dist.TCPStore(
            host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd
        )
    except (OSError, RuntimeError) as error:
        what = f"found no rank 0 at {host}:{port} within {timeout_s:g} s" if rank else f"cannot listen on {host}:{port}"
        raise GroupNotFormed(f"rank {rank} {what}: {_first_line(error)}") from None


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


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


def _await_ranks(store: Any, rank: int, size: int, address: str, timeout_s: float, check: Callable[[], None]) -> None:
    """Raises GroupNotFormed if ranks are missing after `timeout_s`, or if two have the same number."""
    if store.add(f"rank {rank}", 1) > 1:
        raise GroupNotFormed(f"there is a rank {rank} at {address} already")
    keys, deadline = [f"rank {each}" for each in range(size)], time.monotonic() + timeout_s
    while not store.check(keys) and time.monotonic() < deadline:
        check()
        time.sleep(_CONNECT_INTERVAL_S)
    if not store.check(keys):
        missing = [str(each) for each in range(size) if not store.check([f"rank {each}"])]
        raise GroupNotFormed(f"of {size} ranks, {', '.join(missing)} did not come to {address} within {timeout_s:g} s")


def _make_gloo(store: Any, rank: int, size: int, own_host: str) -> Any:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    # Without this, gloo listens on the address of the machine's name.
    options._devices = [gloo.create_device(hostname=own_host)]
    options._timeout = timedelta(seconds=store.timeout.total_seconds())
    return gloo(dist.PrefixStore("gloo", store), rank, size, options)


def _host_towards(host: str) -> str:
    """This machine's address towards a host; a loopback address is itself."""
    if _is_loopback(host):
        return host
    with socket.socket(_family(host, 1), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # a datagram socket sends nothing here
        address: str = probe.getsockname()[0]
    return address


def _make_nccl(store: Any, rank: int, size: int, device: torch.device | None) -> Any:
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise GroupNotFormed(f"this torch ({torch.__version__}) has no NCCL, which GPUs need")
    torch.cuda.set_device(device)
    return nccl(dist.PrefixStore("nccl", store), rank, size, nccl.Options())


def _not_formed(rank: int, size: int, error: RuntimeError) -> GroupNotFormed:
    if isinstance(error, GroupNotFormed):
        return error
    return GroupNotFormed(f"rank {rank} of {size} has no connection to the others: {error}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
