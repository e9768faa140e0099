"""What this router has sent to each worker and not seen the end of: load that no report can be late for."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.protocol.messages import PeerRef

WorkerKey = tuple[str, str]
"""(worker id, incarnation)."""


def worker_key(peer: PeerRef) -> WorkerKey:
    """Of one start of a worker, wherever its address was learned."""
    return peer.peer_id, peer.incarnation


@dataclass(slots=True)
class WorkerLoad:
    """Of one worker, from this router."""

    num_tokens: int = 0  # of prompts that prefill has not answered yet
    num_sequences: int = 0


@dataclass(slots=True)
class Held:
    """What one sequence adds to its workers' load at the moment."""

    prefill: WorkerKey | None = None
    num_tokens: int = 0
    decode: WorkerKey | None = None


class OutstandingLoad:
    """Adds up over all running sequences; each sequence's share is moved, never counted twice."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, WorkerLoad] = {}

    def of(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load; zero where nothing is outstanding."""
        return self._workers.get(key) or WorkerLoad()

    def move(self, held: Held, prefill: PeerRef | None, num_tokens: int, decode: PeerRef | None) -> None:
        """A sequence now waits for `prefill` to compute `num_tokens`, and rests on `decode`."""
        prefill_key = worker_key(prefill) if prefill is not None else None
        decode_key = worker_key(decode) if decode is not None else None
        if prefill_key != held.prefill:
            self._add(held.prefill, -held.num_tokens, -1)
            held.prefill, held.num_tokens = prefill_key, num_tokens
            self._add(prefill_key, num_tokens, 1)
        if decode_key != held.decode:
            self._add(held.decode, 0, -1)
            held.decode = decode_key
            self._add(decode_key, 0, 1)

    @property
    def is_empty(self) -> bool:
        """Nothing is outstanding anywhere."""
        return not self._workers

    def check_integrity(self) -> None:
        """Raises AssertionError where something was taken off that had not been added."""
        for key, load in self._workers.items():
            assert load.num_tokens >= 0 and load.num_sequences > 0, (key, load)

    def _add(self, key: WorkerKey | None, num_tokens: int, num_sequences: int) -> None:
        if key is None:
            return
        load = self._workers.setdefault(key, WorkerLoad())
        load.num_tokens += num_tokens
        load.num_sequences += num_sequences
        if load.num_sequences == 0:
            del self._workers[key]
