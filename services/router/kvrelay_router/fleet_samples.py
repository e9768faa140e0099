"""What a router's metrics tell of its fleets: requests, workers, and the prefix index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, get_args

from kvrelay.telemetry.metrics import MetricSample, MetricSamples, merged, samples_by, single_sample
from kvrelay_router.fleet.view import WorkerState
from kvrelay_router.routing.estimates import Role
from kvrelay_router.served_fleet import ServedFleet

ENDINGS = ("finished", "failed", "timed_out", "cancelled", "refused")


def fleet_samples(fleets: Sequence[ServedFleet]) -> MetricSamples:
    """The samples of all fleets, with the label `model` if there are several."""
    if len(fleets) == 1:
        return _fleet_samples(fleets[0])
    return merged(_labelled(_fleet_samples(fleet), fleet.config.model_name) for fleet in fleets)


def _labelled(samples: MetricSamples, model: str) -> MetricSamples:
    return {
        name: [MetricSample((*labels, ("model", model)), value) for labels, value in found]
        for name, found in samples.items()
    }


def _fleet_samples(fleet: ServedFleet) -> MetricSamples:
    dropped = {"kvrelay.messages.dropped": samples_by("cause", fleet.dispatcher.messenger.num_dropped)}
    return merged([dropped, router_samples(fleet.dispatcher.figures())])


def router_samples(figures: dict[str, Any]) -> MetricSamples:
    """A dispatcher's figures, by the names of the catalogue."""
    requests, cache = figures["requests"], figures["cache"]
    samples: MetricSamples = {
        "kvrelay.requests.submitted": single_sample(requests["submitted"]),
        "kvrelay.requests": samples_by("outcome", {ending: requests[ending] for ending in ENDINGS}),
        "kvrelay.requests.active": single_sample(requests["running"]),
        "kvrelay.sequences.active": single_sample(requests["running_sequences"]),
        "kvrelay.sequences.waiting": single_sample(requests["sequences_waiting_for_worker"]),
        "kvrelay.retries": single_sample(requests["retries"]),
        "kvrelay.protocol_errors": single_sample(requests["protocol_errors"]),
        "kvrelay.placements": samples_by("kind", figures["placements"]),
        "kvrelay.grammar.opening_tokens": single_sample(figures["opening_tokens"]),
        "kvrelay.fallback.requests": single_sample(figures["fallback"]["decode_alone_requests"]),
        "kvrelay.fallback.active": single_sample(int(figures["fallback"]["active"])),
        "kvrelay.prompt.tokens": single_sample(cache["prompt_tokens"]),
        "kvrelay.cache.tokens": samples_by("view", {view: cache[f"{view}_tokens"] for view in ("predicted", "found")}),
        "kvrelay.workers": _workers(figures["worker_states"]),
    }
    return samples | _index(figures["prefix_index"])


def _workers(states: Counter[tuple[str, str]]) -> list[MetricSample]:
    """Of every state, also those that no worker is in: an alert cannot compare a sample that is missing."""
    counts = dict.fromkeys(product(get_args(Role), map(str, WorkerState)), 0) | states
    return [MetricSample((("role", role), ("state", state)), count) for (role, state), count in sorted(counts.items())]


def _index(index: dict[str, Any]) -> MetricSamples:
    """Samples of the index; none if there is no index. The lag is unknown until the first snapshot is read."""
    if index["state"] == "off":
        return {}
    samples: MetricSamples = {
        "kvrelay.index.blocks": single_sample(index["blocks"]),
        "kvrelay.index.events": single_sample(index["events"]),
        "kvrelay.index.loads": single_sample(index["loads"]),
    }
    if index["age_s"] is not None:
        samples["kvrelay.index.lag"] = single_sample(index["age_s"])
    return samples
