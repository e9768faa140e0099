"""Writes the Grafana dashboards beside it from the panels below. A test fails when they are out of date.

Run: .venv/bin/python deploy/observability/dashboards.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "grafana" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `queries`: legend and PromQL."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    text: str = ""


def quantiles(metric: str, by: str = "", where: str = "") -> list[tuple[str, str]]:
    """Median, p90 and p99 of a histogram."""
    legend = f" {{{{{by}}}}}" if by else ""
    labels = f"le, {by}" if by else "le"
    rate = f"rate({metric}_bucket{{{where}}}[{RATE}])" if where else f"rate({metric}_bucket[{RATE}])"
    return [(f"{name}{legend}", f"histogram_quantile({share}, sum by ({labels}) ({rate}))") for name, share in SHARES]


def rate(metric: str, by: str = "", where: str = "") -> tuple[str, str]:
    """A counter's growth a second, over all processes or by a label."""
    chosen = f"{metric}{{{where}}}" if where else metric
    grouped = f" by ({by})" if by else ""
    legend = " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(",")) if by else "all"
    return legend, f"sum{grouped} (rate({chosen}[{RATE}]))"


def gauge(metric: str, by: str, where: str = "", *, of: str = "sum") -> tuple[str, str]:
    """A gauge by a label."""
    chosen = f"{metric}{{{where}}}" if where else metric
    return " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(",")), f"{of} by ({by}) ({chosen})"


SHARES = (("p50", "0.5"), ("p90", "0.9"), ("p99", "0.99"))
POOL_USE = (
    'sum by (job, instance) (kvrelay_blocks{state!~"free|cached"}) / sum by (job, instance) (kvrelay_blocks_limit)'
)
FAILURES = ("{{job}} {{cause}}", f"sum by (job, cause) (rate(kvrelay_handoff_failures_total[{RATE}])) or vector(0)")
BLOCKS_A_MESSAGE = f"sum (rate(kvrelay_push_blocks_total[{RATE}])) / sum (rate(kvrelay_push_messages_total[{RATE}]))"
HIT_RATE = (
    f"sum by (view) (rate(kvrelay_cache_tokens_total[{RATE}])) / ignoring (view) group_left "
    f"sum (rate(kvrelay_prompt_tokens_total[{RATE}]))"
)

DASHBOARDS: dict[str, tuple[str, Sequence[Panel]]] = {
    "overview": (
        "kvrelay: overview",
        (
            Panel("Requests", "reqps", [rate("kvrelay_requests_total", "outcome")]),
            Panel("In progress", "short", [("requests", "sum (kvrelay_requests_active)")]),
            Panel(
                "Errors",
                "reqps",
                [rate("gen_ai_server_request_duration_seconds_count", "error_type", 'error_type!=""')],
                "HTTP requests that ended with an error, or whose client left.",
            ),
            Panel("Time to first token", "s", quantiles("gen_ai_server_time_to_first_token_seconds")),
            Panel("Time per output token", "s", quantiles("gen_ai_server_time_per_output_token_seconds")),
            Panel("Whole requests", "s", quantiles("gen_ai_server_request_duration_seconds")),
            Panel("Tokens computed", "short", [rate("kvrelay_step_tokens_total", "phase")], "Tokens a second."),
            Panel(
                "Workers",
                "short",
                [gauge("kvrelay_workers", "role, state", of="max")],
                "As the router sees them that sees most.",
            ),
            Panel("Retries", "short", [rate("kvrelay_retries_total")], "Attempts that failed and ran again, a second."),
            Panel("Who takes part", "short", [rate("kvrelay_placements_total", "kind")]),
            Panel("Prefix hit rate", "percentunit", [("{{view}}", HIT_RATE)], "As predicted, and as found."),
            Panel("CPU", "short", [rate("process_cpu_time_seconds_total", "job, instance")], "Cores in use."),
        ),
    ),
    "balance": (
        "kvrelay: prefill and decode",
        (
            Panel("Waiting for prefill", "short", [gauge("kvrelay_queue_depth", "instance", 'state="queued"')]),
            Panel(
                "Waiting for decode",
                "short",
                [gauge("kvrelay_queue_depth", "state", 'job="kvrelay-decode",state=~"asked|waiting|swapped"')],
                "The role whose queue grows wants another worker.",
            ),
            Panel("Queued prompt tokens", "short", [gauge("kvrelay_queue_tokens", "job, instance")]),
            Panel(
                "Time in steps",
                "percentunit",
                [rate("kvrelay_step_time_seconds_total", "job, part")],
                "Seconds a second, over all workers of a role.",
            ),
            Panel("Step duration", "s", quantiles("kvrelay_step_duration_seconds", "job")),
            Panel("Step size", "short", quantiles("kvrelay_step_size", "job"), "Tokens."),
            Panel("Steps", "ops", [rate("kvrelay_steps_total", "job, composition")]),
            Panel(
                "Constrained output",
                "ops",
                [
                    ("forced tokens", rate("kvrelay_grammar_forced_tokens_total")[1]),
                    ("masks", rate("kvrelay_grammar_masks_total")[1]),
                    ("grammars {{result}}", rate("kvrelay_grammar_lookups_total", "result")[1]),
                ],
            ),
            Panel(
                "Drafts",
                "ops",
                [
                    ("verified", rate("kvrelay_speculation_drafted_total")[1]),
                    ("accepted", rate("kvrelay_speculation_accepted_total")[1]),
                ],
            ),
            Panel("Tokens by role", "short", [rate("kvrelay_step_tokens_total", "job, phase")]),
            Panel(
                "Running on decode",
                "short",
                [gauge("kvrelay_queue_depth", "instance", 'state="running"')],
                "Sequences in the batch.",
            ),
            Panel(
                "Nothing is disaggregated",
                "short",
                [("now", "max (kvrelay_fallback_active)")],
                "1 while no prefill worker goes with the decode workers.",
            ),
            Panel("Preemptions", "short", [rate("kvrelay_preemptions_total", "method")], "Decode is out of blocks."),
            Panel("Retries that wait for a worker", "short", [("sequences", "sum (kvrelay_sequences_waiting)")]),
        ),
    ),
    "cache": (
        "kvrelay: KV and cache",
        (
            Panel("Blocks by state, prefill", "short", [gauge("kvrelay_blocks", "state", 'job="kvrelay-prefill"')]),
            Panel("Blocks by state, decode", "short", [gauge("kvrelay_blocks", "state", 'job="kvrelay-decode"')]),
            Panel("Pool in use", "percentunit", [("{{job}} {{instance}}", POOL_USE)], "Neither free nor only cached."),
            Panel("How prompts' blocks came", "short", [rate("kvrelay_prompt_blocks_total", "job, source")]),
            Panel("Prefix hit rate", "percentunit", [("{{view}}", HIT_RATE)], "As predicted, and as found."),
            Panel(
                "Quarantined",
                "short",
                [gauge("kvrelay_blocks", "instance", 'state="quarantined"')],
                "Always 0 with ZMQ.",
            ),
            Panel("Lag of the prefix index", "s", [gauge("kvrelay_index_lag_seconds", "instance", of="max")]),
            Panel("Blocks in the index", "short", [gauge("kvrelay_index_blocks", "instance", of="max")]),
            Panel("Changes that wait for Redis", "short", [gauge("kvrelay_index_pending", "job, instance")]),
            Panel(
                "Gaps and replacements",
                "short",
                [
                    ("gaps", f"sum (rate(kvrelay_index_gaps_total[{RATE}]))"),
                    ("replacements", f"sum (rate(kvrelay_index_replacements_total[{RATE}]))"),
                ],
                "Redis lost something; all was published anew.",
            ),
            Panel(
                "Swap space",
                "short",
                [("used", "sum (kvrelay_swap_used)"), ("limit", "sum (kvrelay_swap_limit)")],
                "Blocks, on decode workers.",
            ),
        ),
    ),
    "handoff": (
        "kvrelay: handoff",
        (
            Panel("Duration", "s", quantiles("kvrelay_handoff_duration_seconds", where='job="kvrelay-prefill"')),
            Panel("Wait for the grant", "s", quantiles("kvrelay_handoff_grant_wait_seconds")),
            Panel("Exposed", "s", quantiles("kvrelay_handoff_exposed_seconds", "job"), "What a client can feel."),
            Panel("Size", "bytes", quantiles("kvrelay_handoff_size_bytes")),
            Panel("Speed, GB/s", "short", quantiles("kvrelay_handoff_rate_gigabytes_per_second")),
            Panel("Pushed", "Bps", [rate("kvrelay_push_io_bytes_total", "instance")]),
            Panel("Failures", "short", [FAILURES], "By cause; 0 while there is none."),
            Panel(
                "Corrupted, quarantined",
                "short",
                [
                    ("corrupted", f"sum (rate(kvrelay_handoff_corrupted_total[{RATE}]))"),
                    ("quarantined", f"sum (rate(kvrelay_handoff_quarantines_total[{RATE}]))"),
                ],
            ),
            Panel("Pushing", "percentunit", [rate("kvrelay_push_busy_seconds_total", "instance")], "Share of time."),
            Panel("Waiting states, prefill", "short", [gauge("kvrelay_queue_depth", "state", 'job="kvrelay-prefill"')]),
            Panel("Waiting states, decode", "short", [gauge("kvrelay_queue_depth", "state", 'job="kvrelay-decode"')]),
            Panel(
                "Blocks a message",
                "short",
                [("blocks", BLOCKS_A_MESSAGE)],
            ),
        ),
    ),
}


def dashboard(uid: str) -> dict[str, Any]:
    """Grafana's model of one."""
    title, panels = DASHBOARDS[uid]
    return {
        "uid": f"kvrelay-{uid}",
        "title": title,
        "tags": ["kvrelay"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    x, y = number * WIDTH % COLUMNS, number * WIDTH // COLUMNS * HEIGHT
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Returns 1 if a check found a file that is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would be written")
    check = parser.parse_args().check
    outdated = False
    for uid in DASHBOARDS:
        path = DIRECTORY / f"{uid}.json"
        text = json.dumps(dashboard(uid), indent=1) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated = True
            if not check:
                path.write_text(text, encoding="utf-8")
                sys.stdout.write(f"wrote {path}\n")
    return int(check and outdated)


if __name__ == "__main__":
    sys.exit(main())
