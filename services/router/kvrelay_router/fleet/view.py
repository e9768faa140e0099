"""The router's view of the fleet: registry records merged with the workers' own reports. No I/O.

States of a worker:

1. JOINING       Registered, but has not answered yet.
2. READY         Takes new requests.
3. DRAINING      Finishes its requests: it announced a drain, or left the registry longer ago than the grace time.
4. LOST          The link to it is lost. It becomes READY when it answers, or is replaced by a newer incarnation.
5. INCOMPATIBLE  Worker and router refuse each other. Only a newer incarnation changes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from kvrelay.fleet import WorkerRecord
from kvrelay.protocol.messages import PeerRef, Status
from kvrelay.scheduling.step_cost import StepCost
from kvrelay.text.request.validation import ModelLimits
from kvrelay_router.fleet.load import OutstandingLoad, WorkerLoad, worker_key
from kvrelay_router.routing.estimates import BlockNaming, Candidate, CandidateWorkers

REGISTRY_GRACE_S = 10.0
"""Time that a record may be missing, for example after Redis was emptied, before its worker counts as draining."""

_OTHER_TOKENIZER = (
    "its tokenizer is not this router's: another model is served under this name; give each model its own "
    "served_model_name, or each fleet its own redis_prefix"
)


class WorkerState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    INCOMPATIBLE = "incompatible"


@dataclass(slots=True)
class KnownWorker:
    """One incarnation of a worker. Times are monotonic seconds."""

    record: WorkerRecord
    peer: PeerRef
    answered_at: float | None = None
    status: Status | None = None
    lost: str = ""  # the reason; "" while the link is up
    refused: str = ""  # the reason; "" if compatible
    missing_since: float | None = None  # since when the registry lacks it
    foreign: WorkerLoad | None = None  # reported load minus this router's own share at that moment
    step_cost: StepCost | None = None  # measured speed; None: not measured
    candidate: Candidate | None = None  # cached; None: something changed

    def state(self, now: float) -> WorkerState:
        if self.refused:
            return WorkerState.INCOMPATIBLE
        if self.lost:
            return WorkerState.LOST
        if self.answered_at is None:
            return WorkerState.JOINING
        has_left = self.missing_since is not None and now - self.missing_since > REGISTRY_GRACE_S
        if has_left or self.record.draining or (self.status is not None and self.status.draining):
            return WorkerState.DRAINING
        return WorkerState.READY


class FleetView:
    """All workers of one model. `on_state` is called when an event changes a worker's state."""

    def __init__(
        self,
        load: OutstandingLoad,
        on_state: Callable[[KnownWorker, WorkerState, str], None] | None = None,
        *,
        tokenizer: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._load = load
        self._on_state = on_state
        self._workers: dict[str, KnownWorker] = {}  # sorted by id
        self._limits: tuple[list[WorkerRecord], ModelLimits | None] = ([], None)  # cached for these records
        self._last_records: list[WorkerRecord] = []  # the ready ones when a decode worker last was
        self._ready: list[KnownWorker] | None = None  # cached with `_namings` until the next event
        self._namings: frozenset[BlockNaming] = frozenset()

    # -- events -------------------------------------------------------------------------------------------------------

    def registered(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Takes the registry's current list. A worker missing from it is dropped once it is also lost."""
        present = set()
        self._ready = None
        for record in records:
            present.add(record.worker_id)
            known = self._workers.get(record.worker_id)
            if known is None or _is_succeeded_by(known, record):
                peer = PeerRef(record.worker_id, record.incarnation, record.address)
                self._workers[record.worker_id] = new = KnownWorker(record, peer)
                if self._tokenizer and record.tokenizer and record.tokenizer != self._tokenizer:
                    new.refused = _OTHER_TOKENIZER
                    self._notify(new, WorkerState.JOINING, new.refused, now)
            elif record.incarnation == known.record.incarnation:
                was = known.state(now)
                known.record, known.missing_since, known.candidate = record, None, None
                self._notify(known, was, "its registration says so", now)
        for worker_id, known in list(self._workers.items()):
            if worker_id in present:
                continue
            if known.lost or known.refused:
                del self._workers[worker_id]
            elif known.missing_since is None:
                known.missing_since = now
        self._workers = dict(sorted(self._workers.items()))

    def answered(self, peer: PeerRef, status: Status, now: float) -> None:
        """Takes a worker's report, which is also a life sign."""
        known = self._find(peer)
        if known is None or known.refused:
            return
        was, self._ready = known.state(now), None
        known.foreign = _foreign(status, self._load.of(worker_key(peer)))
        known.status, known.answered_at, known.lost, known.candidate = status, now, "", None
        known.step_cost = StepCost(*status.load.step_cost) if status.load.step_cost is not None else None
        self._notify(known, was, "it answers", now)

    def lost(self, peer: PeerRef, reason: str, now: float) -> None:
        """The link to a worker is lost."""
        known = self._find(peer)
        if known is not None and not known.lost:
            was, known.lost, self._ready = known.state(now), reason, None
            self._notify(known, was, reason, now)

    def refused(self, peer: PeerRef, reason: str, now: float) -> None:
        """A worker and this router are incompatible."""
        known = self._find(peer)
        if known is not None and not known.refused:
            was, known.refused, self._ready = known.state(now), reason, None
            self._notify(known, was, reason, now)

    def assigned(self, worker: Candidate, num_tokens: int) -> None:
        """A worker was sent prompt tokens to compute, which its cache will then contain."""
        self._load.gave(worker_key(worker.peer), num_tokens, worker.num_blocks * worker.block_size)

    # -- queries ------------------------------------------------------------------------------------------------------

    def peers(self) -> list[PeerRef]:
        """All workers except incompatible ones."""
        return [known.peer for known in self._workers.values() if not known.refused]

    def is_gone(self, record: WorkerRecord) -> bool:
        """Returns whether this incarnation is replaced, lost or incompatible."""
        known = self._workers.get(record.worker_id)
        return known is None or known.record.incarnation != record.incarnation or bool(known.lost or known.refused)

    def candidates(self, now: float) -> CandidateWorkers:
        """The ready workers with their load."""
        for worker_id, _ in self._load.changed:
            if (changed := self._workers.get(worker_id)) is not None:
                changed.candidate = None
        self._load.changed.clear()
        ready = [self._candidate(known) for known in self._ready_workers(now)]
        return CandidateWorkers(
            tuple([candidate for candidate in ready if candidate.role == "prefill"]),
            tuple([candidate for candidate in ready if candidate.role == "decode"]),
        )

    def namings(self, now: float) -> frozenset[BlockNaming]:
        """Of the blocks that the ready workers compute."""
        self._ready_workers(now)
        return self._namings

    def limits(self, now: float) -> ModelLimits | None:
        """The smallest limits of the ready workers, or of all workers if none was ready yet. While no decode worker is
        ready, the last ones count too: requests that wait for a worker are checked against them."""
        records = [known.record for known in self._ready_workers(now)]
        if any(record.role == "decode" for record in records):
            self._last_records = records
        else:
            records = self._last_records + [each for each in records if each not in self._last_records]
        records = records or [known.record for known in self._workers.values() if not known.refused]
        if records != self._limits[0]:
            self._limits = records, _limits_of(records) if records else None
        return self._limits[1]

    def has_joining(self, now: float) -> bool:
        """Returns whether a registered worker has not answered yet."""
        return any(known.state(now) is WorkerState.JOINING for known in self._workers.values())

    def states(self, now: float) -> Counter[tuple[str, str]]:
        """Number of workers by role and state."""
        return Counter((known.record.role, str(known.state(now))) for known in self._workers.values())

    def describe(self, live: frozenset[str], now: float) -> list[dict[str, Any]]:
        """The workers as JSON types. `live`: ids of the workers that answered the current query."""
        ordered = sorted(self._workers.items(), key=lambda item: (item[1].record.role != "prefill", item[0]))
        return [
            _describe(known, self._load.of(worker_key(known.peer)), worker_id in live, now)
            for worker_id, known in ordered
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _find(self, peer: PeerRef) -> KnownWorker | None:
        known = self._workers.get(peer.peer_id)
        return known if known is not None and known.peer.incarnation == peer.incarnation else None

    def _ready_workers(self, now: float) -> list[KnownWorker]:
        """Ready workers by id, cached between events because each request needs them several times. Not cached while a
        worker is missing from the registry, since then time changes its state."""
        if self._ready is None:
            ready = [known for known in self._workers.values() if known.state(now) is WorkerState.READY]
            records = [known.record for known in ready]
            self._namings = frozenset(BlockNaming(each.fingerprint, each.numerics, each.block_size) for each in records)
            if any(known.missing_since is not None for known in ready):
                return ready
            self._ready = ready
        return self._ready

    def _candidate(self, known: KnownWorker) -> Candidate:
        """Cached per worker: each request reads all candidates and changes two."""
        if known.candidate is None:
            known.candidate = self._make_candidate(known)
        return known.candidate

    def _make_candidate(self, known: KnownWorker) -> Candidate:
        key = worker_key(known.peer)
        own, head = self._load.of(key), self._load.in_work(key)
        foreign = known.foreign or WorkerLoad()
        record, status = known.record, known.status
        blocks = status.blocks if status is not None else {}
        # `free` already excludes blocks that the worker reserved for a pending handoff.
        num_promised = max(0, own.num_pending_blocks - blocks.get("reserved", 0))
        return Candidate(
            peer=known.peer,
            role=record.role,
            fingerprint=record.fingerprint,
            numerics=record.numerics,
            queued_tokens=own.num_tokens + foreign.num_tokens,
            num_sequences=own.num_sequences + foreign.num_sequences,
            num_free_blocks=blocks.get("free", 0) + blocks.get("cached", 0) - num_promised,
            queued_pairs=own.num_pairs + foreign.num_pairs,
            head_tokens=head.num_tokens,
            head_pairs=head.num_pairs,
            head_since_s=head.since_s,
            num_pending=own.num_pending + foreign.num_pending,
            context_tokens=status.load.context_tokens if status is not None else 0,
            recent_tokens=self._load.recent_tokens(key),
            num_blocks=record.num_blocks,
            block_size=record.block_size,
            block_bytes=record.block_bytes,
            token_budget=record.token_budget,
            step_cost=known.step_cost,
            transfer_bytes_s=status.load.transfer_bytes_s if status is not None else None,
            slow_links=status.load.slow_links if status is not None else {},
        )

    def _notify(self, known: KnownWorker, was: WorkerState, reason: str, now: float) -> None:
        state = known.state(now)
        if self._on_state is not None and state is not was:
            self._on_state(known, state, reason)


def _limits_of(records: list[WorkerRecord]) -> ModelLimits:
    decode = [record for record in records if record.role == "decode"]
    return ModelLimits(
        min(record.max_model_len for record in records),
        min(record.vocab_size for record in records),
        min((record.max_running for record in decode), default=0),
        min((record.num_blocks for record in decode), default=0),
        min((record.block_size for record in decode), default=0),
        jump_forward=all(record.jump_forward for record in records),
    )


def _is_succeeded_by(known: KnownWorker, record: WorkerRecord) -> bool:
    """Incarnations sort by start time, so a stale registry answer does not replace a newer incarnation.

    If the known incarnation is lost, the registry decides, because clocks may be set back.
    """
    is_gone = bool(known.lost or known.refused)
    return record.incarnation > known.record.incarnation or (is_gone and record.incarnation != known.record.incarnation)


def _foreign(status: Status, own: WorkerLoad) -> WorkerLoad:
    """Load of other routers on a worker: its report contains this router's share at that moment."""
    report = status.load
    num_arriving = sum(status.queues.get(name, 0) for name in ("asked", "reserved", "filling"))
    num_pending = max(0, num_arriving - own.num_pending)
    return WorkerLoad(
        max(0, report.queued_tokens - report.own_queued_tokens),
        max(0, report.num_sequences - report.own_sequences) + num_pending,
        max(0.0, report.queued_pairs - report.own_queued_pairs),
        num_pending,
    )


def _describe(known: KnownWorker, own: WorkerLoad, is_live: bool, now: float) -> dict[str, Any]:
    record, status = known.record, known.status
    return {
        "worker_id": record.worker_id,
        "role": record.role,
        "state": str(known.state(now)),
        "reason": known.refused or known.lost,
        "registered": known.missing_since is None,
        "incarnation": record.incarnation,
        "address": record.address,
        "model": record.model,
        "fingerprint": record.fingerprint,
        "numerics": record.numerics,
        "max_model_len": record.max_model_len,
        "block_size": record.block_size,
        "device": record.device,
        "kv_dtype": record.kv_dtype,
        "in_flight_requests": own.num_sequences,
        "in_flight_prompt_tokens": own.num_tokens,
        "queues": dict(status.queues) if status is not None else {},
        "blocks": dict(status.blocks) if status is not None else {},
        "swap": dict(status.swap) if status is not None else {},
        "totals": dict(status.totals) if status is not None else {},
        "histograms": msgspec.to_builtins(status.histograms) if status is not None else {},
        "load": msgspec.to_builtins(status.load) if status is not None else {},
        "live": is_live,
        "age_s": round(now - known.answered_at, 3) if known.answered_at is not None else None,
    }
