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
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
FLEET, NAMES, WORKERS = "", "kvrelay_build_info", 'kvrelay_build_info{name=~"$worker"}'
"""What a metric is joined with: nothing, the names of the processes, or the workers of the dashboard's variable."""
SHARES = (("p50", "0.5"), ("p90", "0.9"), ("p99", "0.99"))


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `queries`: legend and PromQL."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    text: str = ""


def chosen(metric: str, where: str = "", *, of: str, is_counter: bool = False) -> str:
    """The series of a metric, or a counter's growth a second."""
    series = f"{metric}{{{where}}}" if where else metric
    series = f"rate({series}[{RATE}])" if is_counter else series
    return f"{series} * on (job, instance) group_left (name) {of}" if of else series


def legend(by: str) -> str:
    return " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(","))


def quantiles(metric: str, by: str = "", where: str = "", *, of: str = WORKERS) -> list[tuple[str, str]]:
    """Median, p90 and p99 of a histogram."""
    grouped = f"sum by ({f'le, {by}' if by else 'le'}) ({chosen(f'{metric}_bucket', where, of=of, is_counter=True)})"
    suffix = f" {legend(by)}" if by else ""
    return [(f"{name}{suffix}", f"histogram_quantile({share}, {grouped})") for name, share in SHARES]


def rate(metric: str, by: str = "", where: str = "", *, of: str = WORKERS) -> tuple[str, str]:
    """A counter's growth a second, over all processes or by a label."""
    grouped = f" by ({by})" if by else ""
    return legend(by) if by else "all", f"sum{grouped} ({chosen(metric, where, of=of, is_counter=True)})"


def gauge(metric: str, by: str, where: str = "", *, of: str = WORKERS, as_: str = "sum") -> tuple[str, str]:
    """A gauge by a label."""
    return legend(by), f"{as_} by ({by}) ({chosen(metric, where, of=of)})"


def total(metric: str) -> str:
    """A counter's growth a second, over the chosen workers."""
    return rate(metric)[1]


POOL_USE = (
    f"""sum by (job, name) ({chosen("kvrelay_blocks", 'state!~"free|cached"', of=WORKERS)})"""
    f" / sum by (job, name) ({chosen('kvrelay_blocks_limit', of=WORKERS)})"
)
CAUSE, FAILURES = rate("kvrelay_handoff_failures_total", "job, cause")
NONE = 'label_replace(vector(0), "cause", "none", "", "")'
HIT_RATE = (
    f"sum by (view) (rate(kvrelay_cache_tokens_total[{RATE}])) / ignoring (view) group_left "
    f"sum (rate(kvrelay_prompt_tokens_total[{RATE}]))"
)

DASHBOARDS: dict[str, tuple[str, Sequence[Panel]]] = {
    "overview": (
        "kvrelay: overview",
        (
            Panel("Requests", "reqps", [rate("kvrelay_requests_total", "outcome", of=FLEET)]),
            Panel("In progress", "short", [("requests", "sum (kvrelay_requests_active)")]),
            Panel(
                "Errors",
                "reqps",
                [rate("gen_ai_server_request_duration_seconds_count", "error_type", 'error_type!=""', of=FLEET)],
                "HTTP requests that ended with an error, or whose client left.",
            ),
            Panel("Time to first token", "s", quantiles("gen_ai_server_time_to_first_token_seconds", of=FLEET)),
            Panel("Time per output token", "s", quantiles("gen_ai_server_time_per_output_token_seconds", of=FLEET)),
            Panel("Whole requests", "s", quantiles("gen_ai_server_request_duration_seconds", of=FLEET)),
            Panel(
                "Tokens computed", "short", [rate("kvrelay_step_tokens_total", "phase", of=FLEET)], "Tokens a second."
            ),
            Panel(
                "Workers",
                "short",
                [gauge("kvrelay_workers", "role, state", of=FLEET, as_="max")],
                "As the router sees them that sees most.",
            ),
            Panel(
                "Retries",
                "short",
                [rate("kvrelay_retries_total", of=FLEET)],
                "Attempts that failed and ran again, a second.",
            ),
            Panel("Who takes part", "short", [rate("kvrelay_placements_total", "kind", of=FLEET)]),
            Panel("Prefix hit rate", "percentunit", [("{{view}}", HIT_RATE)], "As predicted, and as found."),
            Panel("CPU", "short", [rate("process_cpu_time_seconds_total", "name", of=NAMES)], "Cores in use."),
            Panel("Memory", "bytes", [gauge("process_memory_usage_bytes", "name", of=NAMES)], "Resident."),
        ),
    ),
    "balance": (
        "kvrelay: prefill and decode",
        (
            Panel("Waiting for prefill", "short", [gauge("kvrelay_queue_depth", "name", 'state="queued"')]),
            Panel(
                "Waiting for decode",
                "short",
                [gauge("kvrelay_queue_depth", "state", 'job="kvrelay-decode",state=~"asked|waiting|swapped"')],
                "The role whose queue grows wants another worker.",
            ),
            Panel("Queued prompt tokens", "short", [gauge("kvrelay_queue_tokens", "name")]),
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
                    ("forced tokens", total("kvrelay_grammar_forced_tokens_total")),
                    ("masks", total("kvrelay_grammar_masks_total")),
                    ("grammars {{result}}", rate("kvrelay_grammar_lookups_total", "result")[1]),
                ],
            ),
            Panel(
                "Drafts",
                "ops",
                [
                    ("verified", total("kvrelay_speculation_drafted_total")),
                    ("accepted", total("kvrelay_speculation_accepted_total")),
                ],
            ),
            Panel("Tokens by role", "short", [rate("kvrelay_step_tokens_total", "job, phase")]),
            Panel(
                "Running on decode",
                "short",
                [gauge("kvrelay_queue_depth", "name", 'state="running"')],
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
            Panel("Pool in use", "percentunit", [("{{name}}", POOL_USE)], "Neither free nor only cached."),
            Panel("How prompts' blocks came", "short", [rate("kvrelay_prompt_blocks_total", "job, source")]),
            Panel("Prefix hit rate", "percentunit", [("{{view}}", HIT_RATE)], "As predicted, and as found."),
            Panel(
                "Quarantined",
                "short",
                [gauge("kvrelay_blocks", "name", 'state="quarantined"')],
                "Always 0 with ZMQ.",
            ),
            Panel("Lag of the prefix index", "s", [gauge("kvrelay_index_lag_seconds", "name", of=NAMES)]),
            Panel("Blocks in the index", "short", [gauge("kvrelay_index_blocks", "name", of=NAMES)]),
            Panel("Changes that wait for Redis", "short", [gauge("kvrelay_index_pending", "name")]),
            Panel(
                "Gaps and replacements",
                "short",
                [
                    ("gaps", total("kvrelay_index_gaps_total")),
                    ("replacements", total("kvrelay_index_replacements_total")),
                ],
                "Redis lost something; all was published anew.",
            ),
            Panel(
                "Swap space",
                "short",
                [(part, f"sum ({chosen(f'kvrelay_swap_{part}', of=WORKERS)})") for part in ("used", "limit")],
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
            Panel("Speed", "GBs", quantiles("kvrelay_handoff_rate_gigabytes_per_second")),
            Panel("Pushed", "Bps", [rate("kvrelay_push_io_bytes_total", "name")]),
            Panel("Failures", "short", [(CAUSE, f"{FAILURES} or {NONE}")], "By cause."),
            Panel(
                "Corrupted, quarantined",
                "short",
                [
                    ("corrupted", total("kvrelay_handoff_corrupted_total")),
                    ("quarantined", total("kvrelay_handoff_quarantines_total")),
                ],
            ),
            Panel("Pushing", "percentunit", [rate("kvrelay_push_busy_seconds_total", "name")], "Share of time."),
            Panel("Waiting states, prefill", "short", [gauge("kvrelay_queue_depth", "state", 'job="kvrelay-prefill"')]),
            Panel("Waiting states, decode", "short", [gauge("kvrelay_queue_depth", "state", 'job="kvrelay-decode"')]),
            Panel(
                "Blocks a message",
                "short",
                [("blocks", f"{total('kvrelay_push_blocks_total')} / {total('kvrelay_push_messages_total')}")],
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
        "templating": {"list": _variables(panels)},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variables(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    ]
    if any(WORKERS in query for panel in panels for _, query in panel.queries):
        names = 'label_values(kvrelay_build_info{service!="router"}, name)'
        found.append(
            {
                "name": "worker",
                "label": "Worker",
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": names, "refId": "worker"},
                "definition": names,
                "refresh": 2,  # when the time range changes
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
        )
    return found


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    x, y = number * WIDTH % COLUMNS, number * WIDTH // COLUMNS * HEIGHT
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
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
