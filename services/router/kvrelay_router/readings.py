"""A router's figures as metrics, by the names of the catalogue. Made when somebody reads them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvrelay.telemetry.readings import Point, Readings, plain, points

ENDINGS = ("finished", "failed", "timed_out", "cancelled", "refused")


def router_readings(figures: dict[str, Any]) -> Readings:
    """Of `RouterDispatcher.figures`."""
    requests, cache = figures["requests"], figures["cache"]
    readings: Readings = {
        "kvrelay.requests.submitted": plain(requests["submitted"]),
        "kvrelay.requests": points("outcome", {ending: requests[ending] for ending in ENDINGS}),
        "kvrelay.requests.active": plain(requests["running"]),
        "kvrelay.sequences.active": plain(requests["running_sequences"]),
        "kvrelay.sequences.waiting": plain(requests["sequences_waiting_for_worker"]),
        "kvrelay.retries": plain(requests["retries"]),
        "kvrelay.protocol_errors": plain(requests["protocol_errors"]),
        "kvrelay.placements": points("kind", figures["placements"]),
        "kvrelay.fallback.requests": plain(figures["fallback"]["decode_alone_requests"]),
        "kvrelay.fallback.active": plain(int(figures["fallback"]["active"])),
        "kvrelay.prompt.tokens": plain(cache["prompt_tokens"]),
        "kvrelay.cache.tokens": points("view", {view: cache[f"{view}_tokens"] for view in ("predicted", "found")}),
        "kvrelay.workers": _workers(figures["worker_states"]),
    }
    return readings | _index(figures["prefix_index"])


def _workers(states: Counter[tuple[str, str]]) -> list[Point]:
    return [Point((("role", role), ("state", state)), count) for (role, state), count in sorted(states.items())]


def _index(index: dict[str, Any]) -> Readings:
    """Nothing where there is no index. Its lag is unknown until the first copy is read."""
    if index["state"] == "off":
        return {}
    readings: Readings = {
        "kvrelay.index.blocks": plain(index["blocks"]),
        "kvrelay.index.events": plain(index["events"]),
        "kvrelay.index.loads": plain(index["loads"]),
        "kvrelay.index.lookups": points("by", index["lookups"]),
    }
    if index["age_s"] is not None:
        readings["kvrelay.index.lag"] = plain(index["age_s"])
    return readings
