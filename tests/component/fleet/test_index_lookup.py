"""The router's replica and the bits in Redis against an oracle that goes block by block; Redis Cluster."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import replica as replica_module
from kvrelay.fleet.index.layout import (
    MAX_SLOTS,
    NUM_BUCKETS,
    REMOVED,
    STORED,
    Batch,
    IndexScripts,
    RangeOpened,
    RangeRetired,
    decode_operations,
    decode_slots,
    encode_batch,
    encode_operations,
)
from kvrelay.fleet.index.replica import IndexReplica
from kvrelay.kv.hashing import BlockHash
from tests.fakes.redis_servers import ClusterNode
from tests.thoroughness import examples

TTL_MS = 600_000


def block(name: object) -> BlockHash:
    return hashlib.blake2b(repr(name).encode(), digest_size=16).digest()


def chain_of(length: int, branch: int = 0, branches_at: int = 0) -> list[BlockHash]:
    """All chains begin alike; `branch`, unless 0, and its beginning tell them apart from there on."""
    return [block((i, branch, branches_at) if branch and i >= branches_at else i) for i in range(length)]


def open_at(scripts: IndexScripts, client: Any, slot: int, worker_id: str) -> str:
    """Opens this very slot: what `open` does after so many others, without them."""
    range_id = f"{slot:016x}:00000000"
    client.hset(f"{scripts.base}:slots", str(slot), f"{range_id} {worker_id}")
    client.hset(f"{scripts.base}:seqs", str(slot), 0)
    return range_id


def depths(chain: list[BlockHash], held: dict[str, set[BlockHash]]) -> dict[str, int]:
    """The oracle: one block after the other."""
    found = {}
    for worker_id, blocks in held.items():
        depth = next((i for i, block_hash in enumerate(chain) if block_hash not in blocks), len(chain))
        if depth:
            found[worker_id] = depth
    return found


HOLDERS = st.dictionaries(
    st.integers(0, MAX_SLOTS - 1),
    st.tuples(st.integers(1, 200), st.sampled_from([0, 1, 5, 60, 150]), st.integers(0, 2)),
    max_size=24,
)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    holders=HOLDERS,
    asked=st.tuples(st.integers(0, 220), st.integers(0, 3), st.sampled_from([0, 1, 5, 60, 150])),
    cut=st.integers(0, 200),
    retired=st.sets(st.integers(0, MAX_SLOTS - 1), max_size=3),
)
def test_lookups_are_what_a_walk_along_the_chain_finds(
    redis_server: EmbeddedRedis,
    holders: dict[int, tuple[int, int, int]],
    asked: tuple[int, int, int],
    cut: int,
    retired: set[int],
) -> None:
    """Workers hold prefixes of branching chains, some shortened again, in slots near and far; some are gone."""
    with redis.Redis.from_url(redis_server.url) as client:
        base = f"test:{{{secrets.token_hex(4)}}}:index"
        scripts = IndexScripts(client, base)
        replica = IndexReplica({slot: (f"{slot:016x}:00000000", f"w{slot}", 0) for slot in holders})
        held: dict[str, set[BlockHash]] = {}
        for slot, (length, branches_at, branch) in holders.items():
            range_id = open_at(scripts, client, slot, f"w{slot}")
            chain = chain_of(length, branch, branches_at)
            keep = max(1, length - cut // 2)
            runs = [(STORED, chain[: length // 2]), (STORED, chain[length // 2 :]), (REMOVED, chain[keep:][::-1])]
            operations = encode_operations(run for run in runs if run[1])
            batch = Batch(slot, range_id, 1, operations)
            assert scripts.run("apply", [slot, range_id, 1, TTL_MS, operations, encode_batch(batch)]) == b"OK"
            replica.apply(batch)
            held[f"w{slot}"] = set(chain[:keep])
        for slot in retired & holders.keys():
            scripts.run("close", [slot, f"{slot:016x}:00000000"])
            del held[f"w{slot}"]
            replica.apply(RangeRetired(slot, f"{slot:016x}:00000000"))
        length, branch, branches_at = asked
        chain = chain_of(length, branch, branches_at)
        assert replica.match(chain) == depths(chain, held)
        while scripts.run("sweep", ["s", 10_000, NUM_BUCKETS]):
            pass
        values = [v for key in client.scan_iter(f"{base}:b:*", count=10_000) for v in client.hvals(key)]
        assert all(len(value) >= 2 and value[1] and value[-1] for value in values)  # no zero bytes at the ends
        live = sum(1 << slot for slot in holders.keys() - retired)
        assert not any(decode_slots(value) & ~live for value in values)
        assert sum(decode_slots(value).bit_count() for value in values) == sum(map(len, held.values()))
        for key in list(client.scan_iter(f"{base}*", count=10_000)):
            client.delete(key)


@given(
    runs=st.lists(
        st.tuples(st.sampled_from([STORED, REMOVED]), st.lists(st.binary(min_size=16, max_size=16), min_size=1))
    )
)
def test_operations_come_back_as_they_were(runs: list[tuple[int, list[bytes]]]) -> None:
    assert list(decode_operations(encode_operations(runs))) == runs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[redis.RedisCluster]:
    with ClusterNode(tmp_path) as node, redis.RedisCluster(host="127.0.0.1", port=node.port) as client:
        yield client


def test_the_scripts_keep_to_one_hash_slot_of_a_cluster(cluster: redis.RedisCluster) -> None:
    scripts = IndexScripts(cluster, "test:{model}:index")
    slot = scripts.run("open", ["w", "1", "1:0", TTL_MS, MAX_SLOTS])
    chain = chain_of(300)
    operations = encode_operations([(STORED, chain)])
    event = encode_batch(Batch(slot, "1:0", 1, operations))
    assert scripts.run("apply", [slot, "1:0", 1, TTL_MS, operations, event]) == b"OK"
    assert scripts.run("apply", [slot, "1:0", 1, TTL_MS, b"", b""]) == b"OK"
    assert scripts.run("slots")[3] == [b"0", b"1:0 w", b"1"]
    assert len(scripts.run("snapshot", [0, 1 << 20])[1]) == 300 * (16 + 1 + 2)
    assert scripts.run("close", [slot, "1:0"]) == 1
    assert scripts.run("sweep", ["s", 1000, 1 << 20]) == 0


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    ends=st.sets(st.integers(0, 3)),
    again=st.sets(st.integers(0, 3)),
    num_calls=st.integers(0, 12),
)
def test_a_range_that_ended_is_forgotten_piece_by_piece_and_seen_no_more(
    lengths: list[int], ends: set[int], again: set[int], num_calls: int
) -> None:
    """Also where its slot is given out again before all of it is forgotten."""
    with patch.object(replica_module, "CLEARED_AT_ONCE", 7):
        replica = IndexReplica({})
        held: dict[str, int] = {}

        def start(slot: int, range_id: str, length: int) -> None:
            replica.apply(RangeOpened(slot, range_id, f"w{slot}"))
            replica.apply(Batch(slot, range_id, 1, encode_operations([(STORED, chain_of(length))] if length else [])))
            held[f"w{slot}"] = length

        for slot, length in enumerate(lengths):
            start(slot, "1:0", length)
        for slot in ends & set(range(len(lengths))):
            replica.apply(RangeRetired(slot, "1:0"))
            del held[f"w{slot}"]
        for _ in range(num_calls):
            replica.clear_some()
        for slot in again & ends & set(range(len(lengths))):
            start(slot, "2:0", 3)
        assert replica.match(chain_of(50)) == {name: length for name, length in held.items() if length}
        assert replica.num_held == sum(held.values())
        while replica.clear_some():
            pass
        assert replica.match(chain_of(50)) == {name: length for name, length in held.items() if length}
        assert replica.num_blocks == max(held.values(), default=0)
