"""Every metric of every service, by its OpenTelemetry name: what docs/operations.md lists and pages may show.

Units are UCUM's; what stands in braces is a word for people. Names and attributes are stable: a change is announced in
the changelog.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Service = Literal["router", "prefill", "decode"]
ROUTER: tuple[Service, ...] = ("router",)
PREFILL: tuple[Service, ...] = ("prefill",)
DECODE: tuple[Service, ...] = ("decode",)
WORKERS: tuple[Service, ...] = ("prefill", "decode")
ALL: tuple[Service, ...] = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `attributes`: those that its points may have."""

    name: str
    kind: Kind
    unit: str
    services: tuple[Service, ...]
    text: str
    attributes: tuple[str, ...] = ()


GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "error.type")

_METRICS = (
    # -- requests, as clients see them (OpenTelemetry's conventions for generative AI)
    Metric("gen_ai.server.request.duration", "histogram", "s", ROUTER, "Time from a request to its end", GEN_AI),
    Metric(
        "gen_ai.server.time_to_first_token",
        "histogram",
        "s",
        ROUTER,
        "Time from a request to its first token, of requests that ended well",
        GEN_AI[:3],
    ),
    Metric(
        "gen_ai.server.time_per_output_token",
        "histogram",
        "s",
        ROUTER,
        "Mean time between the tokens of a request after the first, of requests that ended well",
        GEN_AI[:3],
    ),
    # -- the router
    Metric("kvrelay.requests.submitted", "counter", "{request}", ROUTER, "Prompts that were placed"),
    Metric("kvrelay.requests", "counter", "{request}", ROUTER, "Prompts by how they ended", ("outcome",)),
    Metric("kvrelay.requests.active", "gauge", "{request}", ROUTER, "Prompts in progress"),
    Metric("kvrelay.sequences.active", "gauge", "{sequence}", ROUTER, "Sequences in progress"),
    Metric("kvrelay.sequences.waiting", "gauge", "{sequence}", ROUTER, "Retries that wait for a worker to be ready"),
    Metric("kvrelay.retries", "counter", "{attempt}", ROUTER, "Attempts that failed and were followed by another"),
    Metric("kvrelay.protocol_errors", "counter", "{message}", ROUTER, "Messages that contradict their request"),
    Metric("kvrelay.placements", "counter", "{attempt}", ROUTER, "Attempts by who takes part in them", ("kind",)),
    Metric("kvrelay.fallback.requests", "counter", "{request}", ROUTER, "Prompts on decode for lack of prefill"),
    Metric("kvrelay.fallback.active", "gauge", "1", ROUTER, "1 while nothing is disaggregated for lack of prefill"),
    Metric("kvrelay.workers", "gauge", "{worker}", ROUTER, "Workers that this router knows", ("role", "state")),
    Metric("kvrelay.prompt.tokens", "counter", "{token}", ROUTER, "Tokens of the prompts that were answered"),
    Metric("kvrelay.cache.tokens", "counter", "{token}", ROUTER, "Those in a cache, as expected or found", ("view",)),
    Metric("kvrelay.index.lag", "gauge", "s", ROUTER, "Time since the copy of the prefix index was up to date"),
    Metric("kvrelay.index.blocks", "gauge", "{block}", ROUTER, "Distinct blocks that the prefix index knows"),
    Metric("kvrelay.index.events", "counter", "{event}", ROUTER, "Entries of the index's stream that were applied"),
    Metric("kvrelay.index.loads", "counter", "{snapshot}", ROUTER, "Snapshots of the prefix index that were read"),
    Metric("kvrelay.index.lookups", "counter", "{lookup}", ROUTER, "Lookups by who answered", ("by",)),
    # -- queues and blocks
    Metric("kvrelay.queue.depth", "gauge", "{sequence}", WORKERS, "Sequences by waiting state", ("state",)),
    Metric("kvrelay.queue.tokens", "gauge", "{token}", WORKERS, "Tokens of the queued prompts"),
    Metric("kvrelay.cancelled_requests", "gauge", "{attempt}", WORKERS, "Cancelled attempts that are remembered"),
    Metric("kvrelay.blocks", "gauge", "{block}", WORKERS, "Blocks of the pool by owner", ("owner",)),
    Metric("kvrelay.blocks.limit", "gauge", "{block}", WORKERS, "Blocks of the pool"),
    Metric("kvrelay.swap.used", "gauge", "{block}", WORKERS, "Slots of the swap space in use"),
    Metric("kvrelay.swap.limit", "gauge", "{block}", WORKERS, "Slots of the swap space"),
    # -- steps
    Metric("kvrelay.steps", "counter", "{step}", WORKERS, "Steps by what was in them", ("composition",)),
    Metric("kvrelay.steps.ahead", "counter", "{step}", WORKERS, "Steps planned while the one before ran"),
    Metric("kvrelay.steps.launched_ahead", "counter", "{step}", WORKERS, "Steps launched while the one before ran"),
    Metric("kvrelay.steps.captured", "counter", "{step}", WORKERS, "Steps replayed from a CUDA graph"),
    Metric("kvrelay.steps.failed", "counter", "{step}", WORKERS, "Steps that raised"),
    Metric("kvrelay.step.tokens", "counter", "{token}", WORKERS, "Tokens computed, by phase", ("phase",)),
    Metric("kvrelay.step.time", "counter", "s", WORKERS, "Time in steps, by part", ("part",)),
    Metric("kvrelay.step.duration", "histogram", "s", WORKERS, "Time of a step's forward pass"),
    Metric("kvrelay.step.size", "histogram", "{token}", WORKERS, "Tokens of a step"),
    Metric("kvrelay.preemptions", "counter", "{sequence}", DECODE, "Sequences that lost their blocks", ("method",)),
    Metric("kvrelay.swap.given_up", "counter", "{sequence}", DECODE, "Swapped sequences that were computed again"),
    Metric("kvrelay.swap.blocks", "counter", "{block}", DECODE, "Blocks copied to the host and back", ("direction",)),
    Metric("kvrelay.swap.time", "counter", "s", DECODE, "Time of these copies"),
    Metric("kvrelay.prefill_delay.members", "gauge", "{worker}", DECODE, "Other workers that the delayer hears of"),
    Metric("kvrelay.prefill_delay.time", "counter", "s", DECODE, "Time in which the delayer held prompts back"),
    Metric("kvrelay.prefill_delay.passes", "counter", "{pass}", DECODE, "Passes by what the delayer did", ("result",)),
    Metric("kvrelay.prefill_delay.reasons", "counter", "{pass}", DECODE, "Its decisions by reason", ("reason",)),
    # -- sequences and the cache
    Metric("kvrelay.sequences", "counter", "{sequence}", WORKERS, "Sequences by what became of them", ("event",)),
    Metric("kvrelay.prompt.blocks", "counter", "{block}", WORKERS, "Prompts' blocks by how they came", ("source",)),
    # -- handoffs
    Metric("kvrelay.handoff.duration", "histogram", "s", WORKERS, "Time from the question for slots to the commit"),
    Metric("kvrelay.handoff.grant_wait", "histogram", "s", WORKERS, "Time from the question to the grant"),
    Metric("kvrelay.handoff.exposed", "histogram", "s", WORKERS, "What a client can feel of a handoff"),
    Metric("kvrelay.handoff.size", "histogram", "By", WORKERS, "Bytes of a handoff"),
    Metric("kvrelay.handoff.rate", "histogram", "GBy/s", WORKERS, "Speed of a handoff from grant to commit"),
    Metric("kvrelay.handoff.failures", "counter", "{handoff}", WORKERS, "Handoffs that came to nothing", ("cause",)),
    Metric("kvrelay.handoff.resends", "counter", "{question}", DECODE, "Questions for blocks that did not come"),
    Metric("kvrelay.handoff.corrupted", "counter", "{block}", DECODE, "Blocks whose checksum failed"),
    Metric("kvrelay.handoff.quarantines", "counter", "{handoff}", DECODE, "Reservations that went into quarantine"),
    Metric("kvrelay.push.blocks", "counter", "{block}", PREFILL, "Blocks given to the network"),
    Metric("kvrelay.push.io", "counter", "By", PREFILL, "Bytes given to the network"),
    Metric("kvrelay.push.messages", "counter", "{message}", PREFILL, "Frames or writes of pushes"),
    Metric("kvrelay.push.runs", "counter", "{run}", PREFILL, "Runs of neighbouring blocks in them"),
    Metric("kvrelay.push.failures", "counter", "{handoff}", PREFILL, "Pushes that the transport failed"),
    Metric("kvrelay.push.busy", "counter", "s", PREFILL, "Time while any push was under way"),
    # -- what a worker tells the prefix index
    Metric("kvrelay.index.published", "gauge", "{block}", WORKERS, "Blocks that the cache has told of"),
    Metric("kvrelay.index.pending", "gauge", "{change}", WORKERS, "Changes that wait for Redis"),
    Metric("kvrelay.index.open", "gauge", "1", WORKERS, "1 while Redis has a range of this worker"),
    Metric("kvrelay.index.batches", "counter", "{batch}", WORKERS, "Batches that Redis confirmed"),
    Metric("kvrelay.index.changes", "counter", "{change}", WORKERS, "Changes that Redis confirmed"),
    Metric("kvrelay.index.gaps", "counter", "{batch}", WORKERS, "Times that Redis had lost something"),
    Metric("kvrelay.index.replacements", "counter", "{range}", WORKERS, "Times that all was published anew"),
    Metric("kvrelay.index.dropped", "counter", "{change}", WORKERS, "Changes thrown away, too many waited"),
    # -- the process
    Metric("process.cpu.time", "counter", "s", ALL, "CPU time of the process", ("cpu.mode",)),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _METRICS}
