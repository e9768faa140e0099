"""Reports of a worker: status and load for the routers, a digest for the registry, and samples by the names of the
catalogue of metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import fields

import msgspec

from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import LoadReport, PeerRef, Status, StatusQuery
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.step_cost import pairs
from kvrelay.telemetry.metrics import MetricSample, MetricSamples, samples_by, single_sample
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.worker.context import Role, WorkerContext
from kvrelay.worker.speeds import SpeedMeter

LOAD_REPORT_INTERVAL_S = 0.05
"""Seconds within which the other routers receive the new load after a request came, without asking."""
UNSOLICITED = 0
"""The query number of a status that answers no query. Routers count queries from 1."""

QUEUE_METRICS = {"queued_tokens": "kvrelay.queue.tokens", "cancelled_requests": "kvrelay.cancelled_requests"}
"""Entries of `Status.queues` that are no number of sequences in a state, with their metrics."""

TOTALS: dict[str, tuple[str, str, str]] = {
    "prefill_steps": ("kvrelay.steps", "composition", "prefill"),
    "decode_steps": ("kvrelay.steps", "composition", "decode"),
    "mixed_steps": ("kvrelay.steps", "composition", "mixed"),
    "copy_steps": ("kvrelay.steps", "composition", "copies"),
    "steps_ahead": ("kvrelay.steps.ahead", "", ""),
    "steps_launched_ahead": ("kvrelay.steps.launched_ahead", "", ""),
    "captured_steps": ("kvrelay.steps.captured", "", ""),
    "failed_steps": ("kvrelay.steps.failed", "", ""),
    "prefill_tokens": ("kvrelay.step.tokens", "phase", "prefill"),
    "decode_tokens": ("kvrelay.step.tokens", "phase", "decode"),
    "schedule_s": ("kvrelay.step.time", "part", "schedule"),
    "forward_s": ("kvrelay.step.time", "part", "forward"),
    "commit_s": ("kvrelay.step.time", "part", "commit"),
    "drafted_tokens": ("kvrelay.speculation.drafted", "", ""),
    "accepted_tokens": ("kvrelay.speculation.accepted", "", ""),
    "kept_tokens": ("kvrelay.speculation.kept", "", ""),
    "forced_tokens": ("kvrelay.grammar.forced_tokens", "", ""),
    "grammar_masks": ("kvrelay.grammar.masks", "", ""),
    "grammar_mask_s": ("kvrelay.grammar.time", "part", "masks"),
    "grammar_compile_s": ("kvrelay.grammar.time", "part", "compile"),
    "grammars_compiled": ("kvrelay.grammar.lookups", "result", "compiled"),
    "grammars_found": ("kvrelay.grammar.lookups", "result", "cached"),
    "requests": ("kvrelay.sequences", "event", "received"),
    "handed_over": ("kvrelay.sequences", "event", "handed_over"),
    "handoffs_committed": ("kvrelay.sequences", "event", "taken_over"),
    "local_prompts": ("kvrelay.sequences", "event", "local"),
    "failed": ("kvrelay.sequences", "event", "failed"),
    "cancelled": ("kvrelay.sequences", "event", "cancelled"),
    "received_blocks": ("kvrelay.prompt.blocks", "source", "received"),
    "cached_blocks": ("kvrelay.prompt.blocks", "source", "cached"),
    "computed_blocks": ("kvrelay.prompt.blocks", "source", "computed"),
    "preemptions_by_recompute": ("kvrelay.preemptions", "method", "recompute"),
    "preemptions_by_swap": ("kvrelay.preemptions", "method", "swap"),
    "swap_copies_dropped": ("kvrelay.swap.dropped", "", ""),
    "swapped_out_blocks": ("kvrelay.swap.blocks", "direction", "out"),
    "swapped_in_blocks": ("kvrelay.swap.blocks", "direction", "in"),
    "swap_s": ("kvrelay.swap.time", "", ""),
    "corrupted_blocks": ("kvrelay.handoff.corrupted", "", ""),
    "quarantines": ("kvrelay.handoff.quarantines", "", ""),
    "pushed_blocks": ("kvrelay.push.blocks", "", ""),
    "pushed_bytes": ("kvrelay.push.io", "", ""),
    "push_messages": ("kvrelay.push.messages", "", ""),
    "push_runs": ("kvrelay.push.runs", "", ""),
    "push_busy_s": ("kvrelay.push.busy", "", ""),
    "failed_pushes": ("kvrelay.push.failures", "", ""),
    "index_held": ("kvrelay.index.published", "", ""),
    "index_pending": ("kvrelay.index.pending", "", ""),
    "index_open": ("kvrelay.index.open", "", ""),
    "index_batches": ("kvrelay.index.batches", "", ""),
    "index_blocks": ("kvrelay.index.changes", "", ""),
    "index_gaps": ("kvrelay.index.gaps", "", ""),
    "index_replacements": ("kvrelay.index.replacements", "", ""),
    "index_dropped": ("kvrelay.index.dropped", "", ""),
    "prefill_delay_s": ("kvrelay.prefill_delay.time", "", ""),
    "prefill_delayed_passes": ("kvrelay.prefill_delay.passes", "result", "delayed"),
    "prefill_allowed_ran": ("kvrelay.prefill_delay.passes", "result", "ran"),
    "prefill_allowed_idle": ("kvrelay.prefill_delay.passes", "result", "idle"),
}
"""Total of a status to metric, attribute and its value."""

TOTALS_WITHOUT_METRIC = frozenset({"steps", "preemptions", "prompt_blocks", "failed_transfers"})
"""Totals that are sums of other totals, or reported as a counter with a cause."""

DELAYER_OUTCOME = "prefill_delayer."
INSTRUMENT_PREFIXES = ("handoff_failures.",)
"""Prefixes of totals that instruments report."""


class Reports:
    """Reports to the routers that ask. `more_totals` returns totals beside those of the role, the steps and the
    instruments."""

    def __init__(
        self,
        context: WorkerContext,
        role: Role,
        observer: StepObserver,
        more_totals: Callable[[], dict[str, float]],
    ) -> None:
        self.draining = False
        self._worker = context
        self._role = role
        self._observer = observer
        self._more_totals = more_totals
        self._routers: dict[str, PeerRef] = {}  # key: router id
        self._request_sources: set[str] = set()  # routers that sent requests since the last report to the others

    def answer(self, event: Delivered, query: StatusQuery) -> None:
        """Answers a router's query and remembers the router. Blocks of the sessions that it names are evicted first."""
        self._routers[event.peer.peer_id] = event.peer
        for session in query.ended_sessions:
            self._worker.scheduler.blocks.end_session(session)
        plain, named = self._load_reports()
        status = self.status(query.query, named.get(event.peer, plain))
        if query.request:
            events = self._worker.recent.of(query.request) + self._observer.open_events(query.request)
            status = msgspec.structs.replace(status, events=events)
        self._worker.messenger.send(event.peer, status)

    def took_request(self, router: PeerRef) -> None:
        """Notes a request from that router, so that the others get a report."""
        if len(self._routers) > 1:
            self._request_sources.add(router.peer_id)

    def forget(self, peer: PeerRef) -> None:
        """Forgets a router. Does nothing for an unknown one."""
        if self._routers.get(peer.peer_id) == peer:
            del self._routers[peer.peer_id]

    async def run(self) -> None:
        """Sends reports to the other routers until cancelled. A burst that comes through several routers spreads well
        only if each router counts the requests of the others."""
        while True:
            await asyncio.sleep(LOAD_REPORT_INTERVAL_S)
            sources, self._request_sources = self._request_sources, set()
            if sources:
                self._send_status([router for name, router in self._routers.items() if sources != {name}])

    def broadcast_status(self) -> None:
        """Sends the status to every router that asks."""
        self._send_status(list(self._routers.values()))

    def status(self, query: int = UNSOLICITED, load: LoadReport | None = None) -> Status:
        """The worker's status as of now."""
        worker = self._worker
        return Status(
            query=query,
            draining=self.draining,
            queues=self._role.queues(),
            blocks=self._blocks(),
            swap=self._swap(),
            histograms={name: histogram.report() for name, histogram in worker.instruments.histograms()},
            totals=self._role.totals() | self._counters() | self._steps() | self._more_totals(),
            load=load or LoadReport(),
        )

    def digest(self) -> dict[str, float]:
        """The load in the registry's record, for routers that know the worker from the registry alone."""
        report, _ = self._load_reports()
        load: dict[str, float] = {"open": self._role.num_open, "queued_tokens": report.queued_tokens}
        if report.step_cost is not None:
            load |= dict(zip(("step_fixed_s", "step_token_s", "step_pair_s"), report.step_cost, strict=True))
        if report.transfer_bytes_s is not None:
            load["transfer_bytes_s"] = report.transfer_bytes_s
        return load | self._blocks()

    def _send_status(self, routers: list[PeerRef]) -> None:
        if routers:
            plain, named = self._load_reports()
            for router in routers:
                self._worker.messenger.send(router, self.status(UNSOLICITED, named.get(router, plain)))

    def _load_reports(self) -> tuple[LoadReport, dict[PeerRef, LoadReport]]:
        return report_load(self._worker.scheduler, self._worker.steps.speeds, time.monotonic())

    def _steps(self) -> dict[str, float]:
        totals = self._worker.steps.totals
        values = {field.name.removeprefix("num_"): getattr(totals, field.name) for field in fields(totals)}
        grammar_work = totals.grammar_work
        return {name: value for name, value in values.items() if isinstance(value, int | float)} | {
            "copy_steps": totals.num_copy_steps,
            "kept_tokens": self._worker.scheduler.num_kept_tokens,
            "forced_tokens": grammar_work.num_forced_tokens,
            "grammar_masks": grammar_work.num_masks,
            "grammar_mask_s": grammar_work.mask_s,
            "grammars_compiled": grammar_work.num_compiled,
            "grammars_found": grammar_work.num_found,
            "grammar_compile_s": grammar_work.compile_s,
        }

    def _counters(self) -> dict[str, float]:
        """Counters by instrument name and attribute value."""
        return {
            f"{name.removeprefix('kvrelay.').replace('.', '_')}.{value}": amount
            for name, sums in self._worker.instruments.counters.items()
            for value, amount in sums.items()
        }

    def _blocks(self) -> dict[str, int]:
        pool = self._worker.pool
        return {state.value: count for state, count in pool.counts().items()} | {"total": pool.num_blocks}

    def _swap(self) -> dict[str, int]:
        use = self._worker.scheduler.lifecycle.offload.use
        return {"total": use.num_slots, "used": use.num_used_slots}


def status_samples(status: Status) -> MetricSamples:
    """Samples of queues, blocks, swap space and totals. Histograms and counters that are instruments are read from the
    instruments instead. A total without a metric is left out, see `unknown_totals`."""
    depths = {name: depth for name, depth in status.queues.items() if name not in QUEUE_METRICS}
    states = {state: count for state, count in status.blocks.items() if state != "total"}
    samples: MetricSamples = {
        "kvrelay.queue.depth": samples_by("state", depths),
        "kvrelay.blocks": samples_by("state", states),
        "kvrelay.blocks.limit": single_sample(status.blocks["total"]),
        "kvrelay.swap.used": single_sample(status.swap["used"]),
        "kvrelay.swap.limit": single_sample(status.swap["total"]),
    }
    for name, metric in QUEUE_METRICS.items():
        samples[metric] = single_sample(status.queues[name])
    for total, value in status.totals.items():
        if total.startswith(DELAYER_OUTCOME):
            _, prompts, reason = total.split(".")
            sample = MetricSample((("prompts", prompts), ("reason", reason)), value)
            samples.setdefault("kvrelay.prefill_delay.outcomes", []).append(sample)
            continue
        if total not in TOTALS:
            continue
        metric, attribute, of = TOTALS[total]
        samples.setdefault(metric, []).extend(samples_by(attribute, {of: value}) if attribute else single_sample(value))
    return samples


def unknown_totals(status: Status) -> set[str]:
    """Totals for which `TOTALS` lacks a metric. Anything but an empty set is a defect."""
    known = TOTALS.keys() | TOTALS_WITHOUT_METRIC
    return {
        total for total in status.totals.keys() - known if not total.startswith((*INSTRUMENT_PREFIXES, DELAYER_OUTCOME))
    }


def report_load(scheduler: Scheduler, speeds: SpeedMeter, now: float) -> tuple[LoadReport, dict[PeerRef, LoadReport]]:
    """Returns the report for a router without requests here, and for each other router its own report, which names its
    share.

    O(sequences here).
    """
    total = _Sum()
    by_router: dict[PeerRef, _Sum] = {}
    for sequence, num_uncached in _backlog(scheduler):
        num_pairs = pairs(sequence.num_tokens - num_uncached, num_uncached) if num_uncached > 1 else 0.0
        for each in (total, by_router.setdefault(sequence.origin.router, _Sum())):
            each.add(sequence, num_uncached, num_pairs)
    transfer_bytes_s, slow_links = speeds.transfer_rates(now)
    plain = LoadReport(
        queued_tokens=total.num_tokens,
        queued_pairs=total.num_pairs,
        num_sequences=total.num_sequences,
        context_tokens=total.context_tokens,
        step_cost=speeds.step_cost,
        transfer_bytes_s=transfer_bytes_s,
        slow_links=slow_links,
    )
    named = {
        router: msgspec.structs.replace(
            plain,
            own_queued_tokens=own.num_tokens,
            own_queued_pairs=own.num_pairs,
            own_sequences=own.num_sequences,
        )
        for router, own in by_router.items()
    }
    return plain, named


class _Sum:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_pairs = 0.0
        self.num_sequences = 0
        self.context_tokens = 0

    def add(self, sequence: Sequence, num_uncached: int, num_pairs: float) -> None:
        self.num_tokens += num_uncached
        self.num_pairs += num_pairs
        self.num_sequences += 1
        if not num_uncached:
            self.context_tokens += sequence.num_tokens


def _backlog(scheduler: Scheduler) -> Iterable[tuple[Sequence, int]]:
    """Yields every sequence with the prompt tokens that still have to be computed for it."""
    size = scheduler.blocks.pool.block_size
    for sequence in scheduler.waiting:
        if sequence.remote is not None:
            continue  # its prompt is computed elsewhere
        yield sequence, sequence.num_tokens - size * scheduler.blocks.num_cached_blocks(sequence)
    for sequence in scheduler.running.values():
        yield sequence, sequence.num_remaining if sequence.is_prompting else 0
