"""Every metric of every service, by its OpenTelemetry name. docs/metrics.md lists them, and `/metrics` shows no others.

Units are UCUM's; text in braces is an annotation. Names and attributes are stable between releases, so list every
change in the changelog.
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
    """One metric. `attributes`: the attribute names that its samples may have."""

    name: str
    kind: Kind
    unit: str
    services: tuple[Service, ...]
    text: str
    attributes: tuple[str, ...] = ()


GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "error.type")

BUILD = ("service", "name", "model", "version")

_METRICS = (
    # -- requests, as clients see them (OpenTelemetry's conventions for generative AI)
    Metric("gen_ai.server.request.duration", "histogram", "s", ROUTER, "Time from a request to its end", GEN_AI),
    Metric(
        "gen_ai.server.time_to_first_token",
        "histogram",
        "s",
        ROUTER,
        "Time from a request to its first token, successful requests only",
        GEN_AI[:3],
    ),
    Metric(
        "gen_ai.server.time_per_output_token",
        "histogram",
        "s",
        ROUTER,
        "Mean time per output token after the first, successful requests only",
        GEN_AI[:3],
    ),
    Metric("kvrelay.usage.requests", "counter", "{request}", ROUTER, "HTTP requests by key", ("key", "model")),
    Metric("kvrelay.usage.tokens", "counter", "{token}", ROUTER, "Tokens by key", ("key", "model", "kind")),
    # -- the router
    Metric("kvrelay.requests.submitted", "counter", "{request}", ROUTER, "Prompts that were routed"),
    Metric("kvrelay.requests", "counter", "{request}", ROUTER, "Finished prompts by outcome", ("outcome",)),
    Metric("kvrelay.requests.active", "gauge", "{request}", ROUTER, "Prompts in progress"),
    Metric("kvrelay.sequences.active", "gauge", "{sequence}", ROUTER, "Sequences in progress"),
    Metric("kvrelay.sequences.waiting", "gauge", "{sequence}", ROUTER, "Retries that wait for a ready worker"),
    Metric("kvrelay.pending.memory", "gauge", "By", ROUTER, "Unfinished bodies and requests in progress", ("kind",)),
    Metric("kvrelay.pending.limit", "gauge", "By", ROUTER, "The value of max_pending_bytes"),
    Metric("kvrelay.pending.refused", "counter", "{request}", ROUTER, "Requests refused because of max_pending_bytes"),
    Metric("kvrelay.retries", "counter", "{attempt}", ROUTER, "Attempts that failed and were followed by another"),
    Metric("kvrelay.protocol_errors", "counter", "{message}", ROUTER, "Messages that contradict their request"),
    Metric("kvrelay.placements", "counter", "{attempt}", ROUTER, "Attempts by the roles of their workers", ("kind",)),
    Metric("kvrelay.grammar.opening_tokens", "counter", "{token}", ROUTER, "Tokens that grammars forced first"),
    Metric("kvrelay.fallback.requests", "counter", "{request}", ROUTER, "Prompts on decode, no prefill worker ready"),
    Metric("kvrelay.fallback.active", "gauge", "1", ROUTER, "1 while no prefill worker is ready"),
    Metric("kvrelay.workers", "gauge", "{worker}", ROUTER, "Known workers by role and state", ("role", "state")),
    Metric("kvrelay.prompt.tokens", "counter", "{token}", ROUTER, "Prompt tokens of answered requests"),
    Metric("kvrelay.cache.tokens", "counter", "{token}", ROUTER, "Cached tokens, predicted and found", ("view",)),
    Metric("kvrelay.index.lag", "gauge", "s", ROUTER, "Age of the router's replica of the prefix index"),
    Metric("kvrelay.index.blocks", "gauge", "{block}", ROUTER, "Distinct blocks in the prefix index"),
    Metric("kvrelay.index.events", "counter", "{event}", ROUTER, "Stream entries applied to the replica"),
    Metric("kvrelay.index.loads", "counter", "{snapshot}", ROUTER, "Snapshots of the prefix index read"),
    # -- queues and blocks
    Metric("kvrelay.queue.depth", "gauge", "{sequence}", WORKERS, "Sequences by waiting state", ("state",)),
    Metric("kvrelay.queue.tokens", "gauge", "{token}", WORKERS, "Tokens of the queued prompts"),
    Metric("kvrelay.cancelled_requests", "gauge", "{attempt}", WORKERS, "Attempts in the cancelled-request cache"),
    Metric("kvrelay.blocks", "gauge", "{block}", WORKERS, "Blocks of the pool by state", ("state",)),
    Metric("kvrelay.blocks.limit", "gauge", "{block}", WORKERS, "Blocks of the pool"),
    Metric("kvrelay.swap.used", "gauge", "{block}", WORKERS, "Slots of the swap space in use"),
    Metric("kvrelay.swap.limit", "gauge", "{block}", WORKERS, "Slots of the swap space"),
    # -- steps
    Metric("kvrelay.steps", "counter", "{step}", WORKERS, "Steps by composition", ("composition",)),
    Metric("kvrelay.steps.ahead", "counter", "{step}", WORKERS, "Steps planned while the previous one ran"),
    Metric("kvrelay.steps.launched_ahead", "counter", "{step}", WORKERS, "Steps launched while the previous one ran"),
    Metric("kvrelay.steps.captured", "counter", "{step}", WORKERS, "Steps replayed from a CUDA graph"),
    Metric("kvrelay.steps.failed", "counter", "{step}", WORKERS, "Steps that raised"),
    Metric("kvrelay.step.tokens", "counter", "{token}", WORKERS, "Tokens computed, by phase", ("phase",)),
    Metric("kvrelay.step.time", "counter", "s", WORKERS, "Time in steps, by part", ("part",)),
    Metric("kvrelay.step.duration", "histogram", "s", WORKERS, "Time of a step's forward pass"),
    Metric("kvrelay.step.size", "histogram", "{token}", WORKERS, "Tokens of a step"),
    Metric("kvrelay.speculation.drafted", "counter", "{token}", WORKERS, "Drafts that were verified"),
    Metric("kvrelay.speculation.accepted", "counter", "{token}", WORKERS, "Drafts that joined an output"),
    Metric("kvrelay.speculation.kept", "gauge", "{token}", WORKERS, "Tokens of earlier outputs, kept for drafts"),
    Metric("kvrelay.grammar.forced_tokens", "counter", "{token}", WORKERS, "Tokens that grammars forced"),
    Metric("kvrelay.grammar.masks", "counter", "{mask}", WORKERS, "Masks computed for constrained output"),
    Metric("kvrelay.grammar.time", "counter", "s", WORKERS, "Time of masks and compiling, on own threads", ("part",)),
    Metric("kvrelay.grammar.lookups", "counter", "{sequence}", WORKERS, "Grammars of new sequences", ("result",)),
    Metric("kvrelay.preemptions", "counter", "{sequence}", DECODE, "Preempted sequences", ("method",)),
    Metric("kvrelay.swap.dropped", "counter", "{sequence}", DECODE, "Swapped sequences that were recomputed"),
    Metric("kvrelay.swap.blocks", "counter", "{block}", DECODE, "Blocks copied to host and back", ("direction",)),
    Metric("kvrelay.swap.time", "counter", "s", DECODE, "Time of swap copies"),
    Metric("kvrelay.prefill_delay.time", "counter", "s", DECODE, "Time with prompts held back by the delayer"),
    Metric("kvrelay.prefill_delay.passes", "counter", "{pass}", DECODE, "Passes by result of the delayer", ("result",)),
    Metric(
        "kvrelay.prefill_delay.outcomes",
        "counter",
        "{pass}",
        DECODE,
        "Decisions, by the ranks that had a prompt (all, mixed, none)",
        ("prompts", "reason"),
    ),
    # -- sequences and the cache
    Metric("kvrelay.sequences", "counter", "{sequence}", WORKERS, "Sequences by event", ("event",)),
    Metric("kvrelay.prompt.blocks", "counter", "{block}", WORKERS, "Prompt blocks by source", ("source",)),
    # -- handoffs
    Metric("kvrelay.handoff.duration", "histogram", "s", WORKERS, "Time from the reserve message to the commit"),
    Metric("kvrelay.handoff.grant_wait", "histogram", "s", WORKERS, "Time from the reserve message to the grant"),
    Metric("kvrelay.handoff.exposed", "histogram", "s", WORKERS, "Handoff time that compute does not hide"),
    Metric("kvrelay.handoff.size", "histogram", "By", WORKERS, "Bytes of a handoff"),
    Metric("kvrelay.handoff.rate", "histogram", "GBy/s", WORKERS, "Speed of a handoff from grant to commit"),
    Metric("kvrelay.handoff.failures", "counter", "{handoff}", WORKERS, "Failed handoffs by cause", ("cause",)),
    Metric("kvrelay.handoff.corrupted", "counter", "{block}", DECODE, "Blocks whose checksum failed"),
    Metric("kvrelay.handoff.quarantines", "counter", "{handoff}", DECODE, "Reservations that were quarantined"),
    Metric("kvrelay.push.blocks", "counter", "{block}", PREFILL, "Blocks given to the network"),
    Metric("kvrelay.push.io", "counter", "By", PREFILL, "Bytes given to the network"),
    Metric("kvrelay.push.messages", "counter", "{message}", PREFILL, "Frames or writes of pushes"),
    Metric("kvrelay.push.runs", "counter", "{run}", PREFILL, "Runs of neighbouring blocks in pushes"),
    Metric("kvrelay.push.failures", "counter", "{handoff}", PREFILL, "Pushes that the transport failed"),
    Metric("kvrelay.push.busy", "counter", "s", PREFILL, "Time with a push in flight"),
    # -- publication to the prefix index
    Metric("kvrelay.index.published", "gauge", "{block}", WORKERS, "Blocks published to the prefix index"),
    Metric("kvrelay.index.pending", "gauge", "{change}", WORKERS, "Changes waiting for Redis"),
    Metric("kvrelay.index.open", "gauge", "1", WORKERS, "1 while Redis has a range of this worker"),
    Metric("kvrelay.index.batches", "counter", "{batch}", WORKERS, "Batches that Redis confirmed"),
    Metric("kvrelay.index.changes", "counter", "{change}", WORKERS, "Changes that Redis confirmed"),
    Metric("kvrelay.index.gaps", "counter", "{batch}", WORKERS, "Losses of published data in Redis"),
    Metric("kvrelay.index.replacements", "counter", "{range}", WORKERS, "Complete republications"),
    Metric("kvrelay.index.dropped", "counter", "{change}", WORKERS, "Changes dropped because too many waited"),
    # -- messages and the process
    Metric("kvrelay.messages.dropped", "counter", "{message}", ALL, "Messages that were dropped, by cause", ("cause",)),
    Metric("kvrelay.build_info", "gauge", "1", ALL, "1, with what this process is", BUILD),
    Metric("process.memory.usage", "gauge", "By", ALL, "Resident memory of the process"),
    Metric("process.cpu.time", "counter", "s", ALL, "CPU time of the process", ("cpu.mode",)),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _METRICS}
