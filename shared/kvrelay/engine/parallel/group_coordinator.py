"""How the processes of a group find each other: rank 0 listens, and all come to it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Self

import torch
import torch.distributed as torch_distributed
from torch.nn import functional

from kvrelay.engine.parallel.shared_memory import RankEnded, RanksInC, SharedMemory, can_sum, share_memory
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.step.batch import DeviceLost

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
    `GroupCoordinator.connect`. Raises GroupNotFormed if some ranks are missing after `timeout_s`, or the address is
    taken."""
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


_CPU = torch.device("cpu")
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longest wait for another rank in a collective: ranks load weights at different speeds. A rank whose process ends is
noticed at once, since its connection closes."""
_WAIT = timedelta(seconds=0.5)
"""Time between looks at whether this rank has left while it waits in a collective."""
_abandoned: list[Any] = []
"""Collectives that may never end, with their groups."""


class RankLost(DeviceLost):
    """Another rank ended or failed in a collective. The group is of no use afterwards."""


class GroupCoordinator:
    """One rank's connection to its group. Calls come from one thread at a time. If another rank is gone, collectives
    raise RankLost."""

    def __init__(self, rank: int, size: int, store: Any, own_host: str, timeout_s: float, device: torch.device) -> None:
        """Connects ranks that all have come to a store. `own_host`: the address of this machine at which the other
        ranks reach it. Raises GroupNotFormed."""
        self.rank = rank
        self.size = size
        self.own_host = own_host
        self._store = store  # rank 0's is the server of the others' stores
        self._timeout_s = timeout_s
        self._device = device
        self._has_left = False
        self._shared: SharedMemory | None = None
        self._nccl: Any = None
        self._close_others: list[Callable[[], None]] = []
        self._parts: list[Self] = []
        try:
            self._gloo = make_gloo(store, rank, size, own_host)
            self._check_connected(self._gloo, _CPU)
            if device.type == "cuda":
                self._nccl = make_nccl(store, rank, size, device)
                self._check_connected(self._nccl, device)
            else:
                self._shared = share_memory(rank, size, self.all_texts)
        except RuntimeError as error:
            if isinstance(error, GroupNotFormed):
                raise
            raise GroupNotFormed(f"rank {rank} of {size} has no connection to the others: {error}") from None

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int | None,
        address: tuple[str, int],
        timeout_s: float,
        device: torch.device = _CPU,
        *,
        listener: socket.socket | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Self:
        """Joins the group. Returns once all ranks have.

        Rank 0 states the size, and listens at the address, a host and a port; if that is a loopback one, nothing
        listens beyond loopback. `device` is the device of this rank's tensors. Rank 0 may bring its `listener` at that
        address, which the group takes over. `check` is called while this rank waits for others, and ends that by
        raising. Raises GroupNotFormed if some ranks are missing after `timeout_s`, or the address is taken.
        """
        store, size = meet(rank, size, address, timeout_s, listener=listener, check=check)
        return cls(rank, size, store, host_towards(address[0]), timeout_s, device)

    def divide(self, size: int) -> Self:
        """The group of those `size` neighbouring ranks of this group to which this rank belongs. Ranks are counted from
        0 there. It is left and closed with this group. All ranks call it at the same time. Raises ValueError if the
        group does not divide by `size`, GroupNotFormed if the ranks cannot be connected."""
        if self.size % size:
            raise ValueError(f"a group of {self.size} ranks does not divide into groups of {size}")
        number, rank = divmod(self.rank, size)
        store = dist.PrefixStore(f"part {number} of {size}", self._store)
        part = type(self)(rank, size, store, self.own_host, self._timeout_s, self._device)
        self._parts.append(part)
        self.on_close(part.close)
        return part

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Adds all ranks' contiguous tensors, in place. The sums are the same on all ranks, bit by bit.

        On CPUs each number is added in float32 and in the order of ranks, whatever else the tensor holds. Gloo's own
        sums begin at a rank that depends on where the number lies.
        """
        if self._shared is not None and can_sum(tensor):
            with self._shared_collective():
                self._shared.all_reduce(tensor, self._check_here)
        elif tensor.is_cuda:
            self._wait(tensor, lambda group: group.allreduce([tensor]))
        else:
            first, *others = self._gather_to_all(tensor)
            total = first.float()
            for each in others:
                total += each
            tensor.copy_(total)

    def gather_columns(self, tensor: torch.Tensor, *, to_all: bool = False) -> torch.Tensor | None:
        """The ranks' tensors `[..., columns]` side by side, on rank 0, or on all ranks. None on others."""
        tensor = tensor.contiguous()
        if self._shared is not None:
            with self._shared_collective():
                parts = self._shared.gather(tensor, self._check_here, is_wanted=to_all or self.rank == 0)
        elif to_all:
            parts = self._gather_to_all(tensor)
        else:
            options = dist.GatherOptions()
            options.rootRank = 0
            parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
            self._wait(tensor, lambda group: group.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else None

    def _gather_to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' contiguous tensors of this shape, without shared memory."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(tensor, lambda group: group.allgather([parts], [tensor]))
        return parts

    @property
    def shares_memory(self) -> bool:
        """Returns whether `run_in_c` is possible. The same on all ranks."""
        return self._shared is not None

    def run_in_c(self, call: Callable[[RanksInC], None]) -> None:
        """Runs C that sums over the ranks by itself, through the memory that they share."""
        with self._shared_collective():
            assert self._shared is not None
            self._shared.run_in_c(call, self._check_here)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, in the order of ranks. Each rank gives as many. They pass between CPUs, also if the
        tensors are on GPUs: no device waits for them."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = self.gather_columns(own, to_all=True)
        assert found is not None
        every: list[list[int]] = found.view(self.size, len(numbers)).tolist()
        return every

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The `rows` `[counts[rank], columns]` of all ranks below each other, on all ranks. `counts`: of all ranks."""
        longest, columns = max(counts), rows.shape[-1]
        padded = functional.pad(rows, (0, 0, 0, longest - len(rows)))
        found = self.gather_columns(padded.view(-1), to_all=True)
        assert found is not None
        every = found.view(self.size, longest, columns)
        return torch.cat([every[rank, :count] for rank, count in enumerate(counts)])

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return min(each for (each,) in self.exchange([number]))

    @contextmanager
    def in_agreement(self) -> Iterator[None]:
        """Runs a block without collectives on all ranks. If it raises on one of them, it raises on all. Raises
        UnsupportedModel with the error of another rank."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        messages = self.all_texts("" if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message:
                raise UnsupportedModel(f"rank {rank} of {self.size}: {message}")

    def all_texts(self, text: str) -> list[str]:
        """The texts of all ranks."""
        raw = text.encode()
        longest = max(length for (length,) in self.exchange([len(raw)]))
        if not longest:
            return [""] * self.size
        found = self.gather_columns(torch.tensor([*raw, *bytes(longest - len(raw))], dtype=torch.uint8), to_all=True)
        assert found is not None
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in found.view(self.size, longest)]

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
        self._gloo = self._nccl = self._store = self._shared = None

    def _check_connected(self, group: Any, device: torch.device) -> None:
        """Runs a collective, in which backends open their connections. Raises RuntimeError."""
        group.set_timeout(timedelta(seconds=self._timeout_s))
        group.allreduce([torch.zeros(1, device=device)]).wait()
        group.set_timeout(_COLLECTIVE_TIMEOUT)

    def _check_here(self) -> None:
        if self._gloo is None or self._has_left:
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

    def _wait(self, tensor: torch.Tensor, begin: Callable[[Any], Any]) -> None:
        """Waits for a collective. Raises RankLost."""
        self._check_here()
        try:
            if tensor.is_cuda:
                begin(self._nccl).wait()  # a time limit would make the host wait for the device
                return
            work = begin(self._gloo)
            while not self._has_ended(work):
                if self._has_left:
                    self._abandon(work)
                    raise RankLost(f"rank {self.rank} of {self.size} has left the group")
        except RuntimeError as error:
            raise RankLost(f"a rank of the {self.size} is lost to rank {self.rank}: {first_line(error)}") from error

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
        _abandoned.append((work, self._gloo))


def _exit_at_once() -> None:
    """Ends the process without freeing what waits for a lost rank."""
    logging.shutdown()
    os._exit(1)
