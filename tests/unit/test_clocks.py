"""Durations and deadlines are measured with monotonic clocks. Every use of the wall clock is named here."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
ALLOWED = {
    "services/router/kvrelay_router/asgi/operations.py": "when `/fleet` was asked, for charts",
    "services/router/kvrelay_router/dispatch/placement.py": "when a decision was made, for people",
    "services/router/kvrelay_router/dispatch/records.py": "when a request came, for people",
    "services/router/kvrelay_router/openai/api_service.py": "`created` of answers",
    "services/router/kvrelay_router/openai/settings.py": "`created` of the model",
    "services/router/kvrelay_router/responses/responses_format.py": "`created_at` of responses",
    "shared/kvrelay/text/chat_template.py": "the date that templates ask for",
    "shared/kvrelay/backends/cpu_build.py": "the age of files that killed compilations left",
    "shared/kvrelay/messaging/messenger.py": "names of incarnations; a start with an earlier clock is accepted, too",
    "shared/kvrelay/telemetry/event_log.py": "times of lines",
    "shared/kvrelay/telemetry/handoffs.py": "times of stages, to compare processes",
    "shared/kvrelay/telemetry/step_observer.py": "times of lines",
    "shared/kvrelay/telemetry/otlp.py": "times of samples, as OTLP wants them",
    "shared/kvrelay/telemetry/tracer.py": "times of spans and stages, to compare processes",
}


def wall_clock_uses(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found |= {f"{node.module}.{each.name}" for each in node.names}
    return found & WALL_CLOCK


def test_the_wall_clock_is_read_only_for_times_that_are_shown_or_compared_between_machines() -> None:
    folders = (ROOT / "services", ROOT / "shared" / "kvrelay")
    files = {path for folder in folders for path in folder.rglob("*.py")}
    users = {str(path.relative_to(ROOT)) for path in files if wall_clock_uses(path.read_text(encoding="utf-8"))}
    assert users == set(ALLOWED)


def test_uses_are_found_however_they_are_spelled() -> None:
    assert wall_clock_uses("import time\nclock = time.time")
    assert wall_clock_uses("from time import time_ns")
    assert wall_clock_uses("import datetime\ndatetime.datetime.now()")
    assert not wall_clock_uses("import time\ntime.monotonic()")
