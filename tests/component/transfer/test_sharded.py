"""Handoffs between workers with unequal numbers of ranks: each rank is a pool with a sender or receiver of its own."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.handoff.transports.base import (
    BlockPush,
    Landed,
    Pushed,
    SenderDrained,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from kvrelay.handoff.transports.pool_memory import PartCopy, PoolChecksums
from kvrelay.handoff.transports.process_memory import ProcessMemory
from kvrelay.handoff.transports.sharded import ShardedReceiver, ShardedSender, ShardLayout
from kvrelay.handoff.transports.wire import Bytes
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.kv.shard_map import ShardShape
from tests.component.ranks.remote_ends import ChannelReceiver, ChannelSender
from tests.component.transfer.rig import Log
from tests.component.transfer.transports import EMPTY, NO_NIXL, staged, target_pool, zmq_sender
from tests.fakes.hanging_agent import fake_network
from tests.fakes.waiting import PATIENCE_S

pytestmark = [pytest.mark.component]

NUM_LAYERS, BLOCK_SIZE, HEAD_BYTES = 5, 4, 32
NUM_BLOCKS = 40
HEAD_RUN = BLOCK_SIZE * HEAD_BYTES


@dataclass(frozen=True)
class Ends:
    """How the ends of a rank are made over its pool."""

    sender: Callable[[Bytes], TransferSender]
    receiver: Callable[[Bytes], TransferReceiver]
    why_not: str = ""


ENDS = {
    "zmq": Ends(zmq_sender, ZmqReceiver),
    "zmq-tcp": Ends(zmq_sender, lambda pool: ZmqReceiver(pool, local=False)),
    "zmq-checksum": Ends(lambda pool: zmq_sender(pool, checksum=True), ZmqReceiver),
    "zmq-staged-checksum": Ends(
        lambda pool: zmq_sender(staged(pool), checksum=True), lambda pool: ZmqReceiver(staged(pool))
    ),
    "zmq-channel": Ends(  # every rank behind the channel between ranks
        lambda pool: ChannelSender(zmq_sender(pool)),
        lambda pool: ChannelReceiver(ZmqReceiver(pool, admission_wait_s=PATIENCE_S)),
    ),
    "nixl": Ends(NixlSender, NixlReceiver, NO_NIXL),
    "nixl-channel": Ends(
        lambda pool: ChannelSender(NixlSender(pool)),
        lambda pool: ChannelReceiver(NixlReceiver(pool, admission_wait_s=PATIENCE_S)),
        NO_NIXL,
    ),
    "nixl-checksum": Ends(lambda pool: NixlSender(pool, checksums=PoolChecksums(pool)), NixlReceiver, NO_NIXL),
}
NIXL_TCP = Ends(
    lambda pool: NixlSender(pool, settings=NixlSettings(ucx_transports="tcp")),
    lambda pool: NixlReceiver(pool, ucx_transports="tcp"),
    NO_NIXL,
)
"""As between machines."""
FAKE_NIXL = Ends(NixlSender, NixlReceiver)
"""Within `fake_network`."""
Size = int | tuple[int, int]
"""Ranks, or stages and the ranks of each."""
SIZES: list[tuple[Size, Size]] = [
    *((1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4), (4, 2), (2, 4)),
    *(((2, 1), 1), (1, (2, 1)), ((2, 1), (2, 1)), ((2, 1), (3, 1)), ((3, 1), (2, 1)), ((5, 1), (2, 1))),
    *(((2, 1), 2), (2, (2, 1)), ((2, 2), 1), (1, (2, 2)), ((2, 2), (3, 1)), ((3, 2), (2, 4)), ((2, 2), (2, 2))),
]


@pytest.fixture(params=list(ENDS))
def ends(request: pytest.FixtureRequest) -> Ends:
    found = ENDS[request.param]
    if found.why_not:
        pytest.skip(found.why_not)
    return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def layout_of(size: Size, num_heads: int) -> ShardLayout:
    num_stages, size = size if isinstance(size, tuple) else (1, size)
    shape = ShardShape(size, num_heads, num_stages)
    return ShardLayout.of(shape, NUM_LAYERS, 2 * shape.heads_per_rank * HEAD_RUN)


def whole_kv(num_heads: int) -> NDArray[np.uint8]:
    """The KV of all heads, [block, row, head, bytes of a head's tokens]."""
    shape = (NUM_BLOCKS, 2 * NUM_LAYERS, num_heads, HEAD_RUN)
    return np.random.default_rng(7).integers(0, 256, shape, np.uint8)


def rank_pool(kv: NDArray[np.uint8], shape: ShardShape, rank: int) -> Bytes:
    """A rank's blocks, cut out of the whole: written without the map."""
    # Rank 0 is in the last stage, and the stages before it follow from the first one on.
    stage = [shape.num_stages - 1, *range(shape.num_stages - 1)][rank // shape.size]
    rows = 2 * np.array_split(np.arange(NUM_LAYERS), shape.num_stages)[stage][:, None] + np.arange(2)
    first = rank % shape.size * shape.num_kv_heads // shape.size
    mine = kv[:, rows.ravel(), first : first + max(1, shape.num_kv_heads // shape.size)]
    return np.ascontiguousarray(mine).reshape(NUM_BLOCKS, -1)


class Worker:
    """The ranks of a prefill or decode worker."""

    def __init__(self, pools: list[Bytes]) -> None:
        self.pools = pools
        self.log = Log()

    def landed(self, reservation: str) -> list[int]:
        events = [each for each in self.log.events if isinstance(each, Landed) and each.reservation == reservation]
        return sorted(block for each in events for block in each.blocks)

    def pushed(self, reservation: str) -> list[int]:
        events = [each for each in self.log.events if isinstance(each, Pushed) and each.reservation == reservation]
        return sorted(block for each in events for block in each.blocks)


class Pair:
    """A prefill worker and a decode worker."""

    def __init__(self, ends: Ends, stack: ExitStack, sizes: tuple[Size, Size], num_heads: int) -> None:
        self.kv = whole_kv(num_heads)
        source, target = layout_of(sizes[0], num_heads), layout_of(sizes[1], num_heads)
        self.source_shape, self.target_shape = source.shape, target.shape
        self.prefill = Worker([rank_pool(self.kv, source.shape, rank) for rank in range(source.shape.num_ranks)])
        widths = [rank_pool(self.kv, target.shape, rank).shape[1] for rank in range(target.shape.num_ranks)]
        self.decode = Worker([target_pool(NUM_BLOCKS, width) for width in widths])
        self.rank_senders = [ends.sender(pool) for pool in self.prefill.pools]
        self.sender = ShardedSender(self.rank_senders, source)
        self.receiver = ShardedReceiver([ends.receiver(pool) for pool in self.decode.pools], target)
        for end, worker in ((self.receiver, self.decode), (self.sender, self.prefill)):
            stack.callback(end.close)
            end.start(worker.log.add)

    def admit(self, reservation: str, slots: Sequence[int], first_block: int = 0) -> None:
        self.receiver.admit(reservation, first_block, slots, self.source_shape)

    def push(self, reservation: str, copies: Sequence[BlockPush]) -> None:
        self.sender.push(reservation, self.receiver.endpoints, copies, self.receiver.num_stages)

    def assert_arrived(self, copies: Sequence[BlockPush]) -> None:
        """Each rank of decode has its heads of these blocks, and nothing else was touched."""
        for rank, pool in enumerate(self.decode.pools):
            expected = np.full_like(pool, EMPTY)
            whole = rank_pool(self.kv, self.target_shape, rank)
            for copy in copies:
                expected[copy.slot] = whole[copy.source]
            assert np.array_equal(pool, expected), f"rank {rank}"


def scattered(count: int, first_block: int = 0) -> list[BlockPush]:
    random = np.random.default_rng(3)
    sources, slots = random.permutation(NUM_BLOCKS)[:count], random.permutation(NUM_BLOCKS)[:count]
    numbers = enumerate(zip(sources.tolist(), slots.tolist(), strict=True), first_block)
    return [BlockPush(index, source, slot) for index, (source, slot) in numbers]


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_each_rank_gets_its_layers_and_heads_and_each_block_is_reported_once(
    ends: Ends, stack: ExitStack, sizes: tuple[Size, Size], num_heads: int
) -> None:
    await check_a_handoff(Pair(ends, stack, sizes, num_heads))


@pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4), ((2, 2), (3, 1))], ids=str)
async def test_ranks_on_several_machines_write_over_tcp(stack: ExitStack, sizes: tuple[Size, Size]) -> None:
    await check_a_handoff(Pair(NIXL_TCP, stack, sizes, 4))


UNEQUAL: list[tuple[Size, Size]] = [(2, 1), (1, 2), (4, 1), (1, 4), ((2, 2), (3, 1))]


@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
async def test_short_runs_are_written_together_on_one_machine(stack: ExitStack, sizes: tuple[Size, Size]) -> None:
    """NIXL writes the last run of each piece. Its agent is a fake."""
    network = stack.enter_context(fake_network())
    await check_a_handoff(Pair(FAKE_NIXL, stack, sizes, 4))
    assert set(network.num_rows) == {1}


@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
async def test_nixl_writes_all_runs_if_a_process_forbids_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, sizes: tuple[Size, Size]
) -> None:
    tries: list[ProcessMemory] = []

    def refuse(memory: ProcessMemory, *_: object) -> None:
        tries.append(memory)
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(ProcessMemory, "write", refuse)
    network = stack.enter_context(fake_network())
    pair = Pair(FAKE_NIXL, stack, sizes, 4)
    await check_a_handoff(pair)
    assert min(network.num_rows) > 1
    parts = pair.sender._layout.copies_to(pair.target_shape)
    assert len(tries) == len({(part.source_rank, part.target_rank) for part in parts})  # once for each connection


@pytest.mark.parametrize("restrict", ["setting", "variable"])
async def test_a_list_of_ucx_transports_holds_for_all_runs(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, restrict: str
) -> None:
    settings = NixlSettings(ucx_transports="tcp") if restrict == "setting" else NixlSettings()
    if restrict == "variable":
        monkeypatch.setenv("UCX_TLS", "tcp")
    network = stack.enter_context(fake_network())
    await check_a_handoff(Pair(Ends(lambda pool: NixlSender(pool, settings=settings), NixlReceiver), stack, (2, 1), 4))
    assert min(network.num_rows) > 1


async def check_a_handoff(pair: Pair) -> None:
    copies = scattered(25, first_block=3)
    pair.admit("r", [copy.slot for copy in copies], first_block=3)
    for first in range(0, 25, 10):
        pair.push("r", copies[first : first + 10])
    blocks = [copy.index for copy in copies]
    await pair.decode.log.until(lambda: pair.decode.landed("r") == blocks)
    await pair.prefill.log.until(lambda: pair.prefill.pushed("r") == blocks)
    pair.assert_arrived(copies)
    pair.receiver.release("r")
    pair.sender.abort("r")
    await pair.prefill.log.until(lambda: SenderDrained("r") in pair.prefill.log.events)
    assert pair.prefill.log.events.count(SenderDrained("r")) == 1


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (4, 2), ((2, 1), (2, 1)), ((2, 2), (3, 1))], ids=str)
async def test_no_block_lands_without_the_part_of_a_lost_rank_and_all_do_when_it_comes_again(
    ends: Ends, stack: ExitStack, sizes: tuple[Size, Size]
) -> None:
    pair, copies = Pair(ends, stack, sizes, 4), scattered(12)
    pair.admit("r", [copy.slot for copy in copies])
    lost = pair.rank_senders[-1]
    pushes: list[tuple[dict[str, str], Sequence[BlockPush], PartCopy]] = []
    original = lost.push

    def lose(reservation: str, endpoint: dict[str, str], some: Sequence[BlockPush], part: PartCopy) -> None:
        pushes.append((endpoint, some, part))

    lost.push = lose  # type: ignore[method-assign,assignment]
    pair.push("r", copies)
    # What the other ranks have sent is there when a whole handoff behind it is.
    behind = [BlockPush(index, index, slot) for index, slot in enumerate(free_slots(copies, 5))]
    lost.push = original  # type: ignore[method-assign]
    pair.admit("behind", [copy.slot for copy in behind])
    pair.push("behind", behind)
    await pair.decode.log.until(lambda: pair.decode.landed("behind") == list(range(5)))
    assert pair.decode.landed("r") == pair.prefill.pushed("r") == []
    for endpoint, some, part in pushes:
        original("r", endpoint, some, part)
    await pair.decode.log.until(lambda: pair.decode.landed("r") == list(range(12)))
    pair.assert_arrived([*copies, *behind])


async def test_the_failure_of_one_rank_is_one_failure_and_drains_once(ends: Ends, stack: ExitStack) -> None:
    pair, copies = Pair(ends, stack, (2, 2), 4), scattered(6)
    pair.admit("r", [copy.slot for copy in copies])
    good, _ = pair.receiver.endpoints
    pair.sender.push("r", [good, {"address": "nothing"}], copies)
    pair.sender.push("r", [{"address": "nothing"}, {"address": "nothing"}], [])
    log = pair.prefill.log
    await log.until(lambda: any(isinstance(event, TransferFailed) for event in log.events))
    pair.sender.abort("r")
    pair.sender.abort("r")
    await log.until(lambda: SenderDrained("r") in log.events)
    assert sum(isinstance(event, TransferFailed) for event in log.events) == 1
    assert log.events.count(SenderDrained("r")) == 1
    assert pair.decode.landed("r") == []


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=str)
async def test_a_write_of_one_rank_that_never_ends_fails_the_handoff_which_drains_when_it_has_ended(
    stack: ExitStack, sizes: tuple[Size, Size]
) -> None:
    """The write of the other rank ends. NIXL's agent is a fake."""
    network = stack.enter_context(fake_network())
    impatient = NixlSettings(stall_timeout_s=0.2, close_timeout_s=0.1)
    pair = Pair(Ends(lambda pool: NixlSender(pool, settings=impatient), NixlReceiver), stack, sizes, 4)
    copies, log = scattered(6), pair.prefill.log
    pair.admit("good", [copy.slot for copy in copies])
    pair.push("good", copies)
    await pair.decode.log.until(lambda: pair.decode.landed("good") == list(range(6)))
    network.num_good = 1
    pair.admit("hung", [copy.slot for copy in copies])
    pair.push("hung", copies)
    await log.until(lambda: any(isinstance(event, TransferFailed) for event in log.events))
    pair.sender.abort("hung")
    await pair.decode.log.until(lambda: len(network.hanging) == 1)
    assert SenderDrained("hung") not in log.events
    network.land_late()
    await log.until(lambda: SenderDrained("hung") in log.events)
    failures = [event for event in log.events if isinstance(event, TransferFailed)]
    assert [event.reservation for event in failures] == ["hung"] and "no progress" in failures[0].cause


async def test_a_worker_with_other_heads_is_refused(stack: ExitStack) -> None:
    pair = Pair(ENDS["zmq"], stack, (2, 1), 4)
    with pytest.raises(ValueError, match="2 KV heads there, 4 here"):
        pair.receiver.admit("r", 0, [1], ShardShape(2, 2))
    assert pair.receiver.why_not_from(ShardShape(3, 4)) == "4 KV heads do not divide among 3 ranks"
    pair.sender.push("r", [{}, {}, {}], [BlockPush(0, 0, 0)])
    assert pair.prefill.log.events == [TransferFailed("r", "4 KV heads do not divide among 3 ranks")]


async def test_stages_that_cannot_be_are_refused(stack: ExitStack) -> None:
    pair = Pair(ENDS["zmq"], stack, (2, 1), 4)
    reason = f"{NUM_LAYERS} layers do not divide among 6 stages"
    assert pair.receiver.why_not_from(ShardShape(1, 4, 6)) == reason
    with pytest.raises(ValueError, match=reason):
        pair.receiver.admit("r", 0, [1], ShardShape(1, 4, 6))
    pair.sender.push("r", [{}, {}, {}], [BlockPush(0, 0, 0)], 2)
    assert pair.prefill.log.events == [TransferFailed("r", "3 ranks do not divide among 2 stages")]


def free_slots(copies: Sequence[BlockPush], count: int) -> list[int]:
    taken = {copy.slot for copy in copies}
    return [slot for slot in range(NUM_BLOCKS) if slot not in taken][:count]
