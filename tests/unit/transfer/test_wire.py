"""The header on the wire, how receivers are named and reached, and parts of blocks as runs of bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.handoff.transports.base import MalformedEndpoint
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy
from kvrelay.handoff.transports.wire import MAGIC, WIRE_VERSION, MalformedBlocks, decode_header, encode_header
from kvrelay.handoff.transports.zmq_receiver import choose_address, local_address
from kvrelay.messaging.zmq_context import tcp_address


@pytest.mark.parametrize("checksums", [None, [0, 0xDEADBEEF, (1 << 32) - 1]])
def test_a_header_comes_back_as_it_was(checksums: list[int] | None) -> None:
    indices, slots = np.array([0, 7, (1 << 32) - 1]), np.array([5, 0, 1])
    sent = None if checksums is None else np.array(checksums, np.uint32)
    header = decode_header(encode_header("r", 4096, indices, slots, sent))
    assert (header.reservation, header.block_bytes) == ("r", 4096)
    assert (None if header.checksums is None else header.checksums.tolist()) == checksums
    assert header.indices.tolist() == indices.tolist()
    assert header.slots.tolist() == slots.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        ["other", WIRE_VERSION, "r", 8, b"1234", b"1234"],
        [MAGIC, WIRE_VERSION + 1, "r", 8, b"1234", b"1234"],
        [MAGIC, WIRE_VERSION, "r", 8, b"", b""],
        [MAGIC, WIRE_VERSION, "r", 8, b"1234", b"12345678"],
        [MAGIC, WIRE_VERSION, "r", 8, b"123", b"123"],
        [MAGIC, WIRE_VERSION, "r", 8, b"1234", b"1234", b"12345678"],
        [MAGIC, WIRE_VERSION, "r", 8, b"1234", b"1234", 5],
        [MAGIC, WIRE_VERSION, 5, 8, b"1234", b"1234"],
        [MAGIC, WIRE_VERSION, "r"],
        {"magic": MAGIC},
    ],
)
def test_anything_else_is_malformed(fields: object) -> None:
    with pytest.raises(MalformedBlocks):
        decode_header(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"GET / HTTP/1.1"])
def test_bytes_that_are_no_msgpack_are_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedBlocks):
        decode_header(frame)


def test_a_cut_header_is_malformed() -> None:
    whole = encode_header("r", 4096, np.arange(3), np.arange(3))
    for length in range(len(whole)):
        with pytest.raises(MalformedBlocks):
            decode_header(whole[:length])


# -- how receivers are named and reached -----------------------------------------------------------------------------


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


@pytest.mark.parametrize("endpoint", [{}, {"address": "tcp://h:80", "machine": "m1"}])
def test_an_endpoint_without_the_address_is_malformed(endpoint: dict[str, str]) -> None:
    with pytest.raises(MalformedEndpoint):
        choose_address(endpoint, "m1")


# -- parts of blocks as runs of bytes, against the bytes that a part names -------------------------------------------


@st.composite
def block_parts(draw: st.DrawFn, num_rows: int, num_bytes: int) -> BlockPart:
    block_rows = num_rows + draw(st.integers(0, 3))
    row_bytes = num_bytes + draw(st.integers(0, 3))
    first_row = draw(st.integers(0, block_rows - num_rows))
    first_byte = draw(st.integers(0, row_bytes - num_bytes))
    return BlockPart(block_rows, row_bytes, first_row, num_rows, first_byte, num_bytes)


@st.composite
def part_copies(draw: st.DrawFn) -> PartCopy:
    size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return PartCopy(0, draw(block_parts(*size)), draw(block_parts(*size)))


def bytes_of(part: BlockPart) -> list[int]:
    """The places of a part's bytes in its block, in the order of the copy."""
    places = np.arange(part.block_bytes).reshape(part.block_rows, part.row_bytes)
    rows = places[part.first_row : part.first_row + part.num_rows]
    chosen: list[int] = rows[:, part.first_byte : part.first_byte + part.num_bytes].ravel().tolist()
    return chosen


@given(part_copies())
def test_runs_copy_the_bytes_of_the_part_in_their_order(copy: PartCopy) -> None:
    source, target = copy.runs()
    assert (source.num_rows, source.num_bytes) == (target.num_rows, target.num_bytes)
    assert (bytes_of(source), bytes_of(target)) == (bytes_of(copy.source), bytes_of(copy.target))
    assert (source.block_bytes, target.block_bytes) == (copy.source.block_bytes, copy.target.block_bytes)


@given(part_copies())
def test_there_is_one_run_where_both_sides_have_one(copy: PartCopy) -> None:
    def is_run(part: BlockPart) -> bool:
        return set(np.diff(bytes_of(part)).tolist()) <= {1}

    num_runs = copy.runs()[0].num_rows
    if is_run(copy.source) and is_run(copy.target) and copy.source.num_rows > 1:
        assert num_runs == 1
    else:
        assert num_runs == copy.source.num_rows
