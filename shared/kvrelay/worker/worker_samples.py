"""Converts a worker's status to metric samples, by the names of the catalogue."""

from __future__ import annotations

from kvrelay.protocol.messages import Status
from kvrelay.telemetry.metrics import MetricSample, MetricSamples, samples_by, single_sample

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
