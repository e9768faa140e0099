"""What a collector gets from real processes: one request is one trace of all services, and metrics come too."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.collector import Collected, Collector
from tests.fakes.stack import Stack

pytestmark = pytest.mark.timeout(240)
DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"
SPAN_ID = "00f067aa0ba902b7"  # the client's


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill worker and two decode workers that export to the collector, and log JSON. Their devices are
    simulated: a worker traces the same steps and handoffs, and starts without importing torch."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        flags = ["--backend", "simulated", "--decode", "2", "--peer-timeout-s", "2.5", "--log-format", "json"]
        with Stack(DEMO_MODEL, tmp_path_factory.mktemp("telemetry"), *flags) as stack:
            yield stack


def trace_headers(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{SPAN_ID}-01"}


def wait_for_spans(collector: Collector, trace_id: str, *names: str) -> Collected:
    return collector.until(lambda found: {span.name for span in found.of(trace_id)} >= set(names))


def test_a_request_is_one_trace_of_all_services(stack: Stack, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    prompt = "Tell me everything about otters, " * 20
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = stack.http.post("/v1/completions", json=body, headers=trace_headers(trace_id))
    assert answer.status_code == 200, answer.text
    names = ["kvrelay.attempt", "kvrelay.prefill", "kvrelay.handoff.send", "kvrelay.handoff.receive", "kvrelay.decode"]
    server_name = f"text_completion {stack.model}"
    found = wait_for_spans(collector, trace_id, server_name, *names)
    found.check_parents(trace_id, SPAN_ID)
    (server,) = found.of(trace_id, server_name)
    assert (server.service, server.parent_id) == ("kvrelay-router", SPAN_ID)
    usage = answer.json()["usage"]
    assert server.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert server.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    (attempt,) = found.of(trace_id, "kvrelay.attempt")
    assert attempt.parent_id == server.span_id
    for name in names[1:]:
        (span,) = found.of(trace_id, name)
        assert span.parent_id == attempt.span_id
        assert span.service == ("kvrelay-prefill" if name.endswith(("prefill", "send")) else "kvrelay-decode")
        role = span.service.removeprefix("kvrelay-")
        assert span.instance == attempt.attributes[f"kvrelay.worker.{role}"]
    collector.until(lambda found: any(trace_id in span.links for span in found.spans if span.name == "kvrelay.step"))


def test_metrics_come_too(stack: Stack, collector: Collector) -> None:
    body = {"model": stack.model, "messages": [{"role": "user", "content": "otter"}], "max_tokens": 4}
    assert stack.http.post("/v1/chat/completions", json=body).status_code == 200

    def has_chat(found: Collected) -> bool:
        metric = found.metrics.get(("kvrelay-router", "gen_ai.server.request.duration"))
        points: Any = [] if metric is None else metric.histogram.data_points
        operations = [pair.value.string_value for point in points for pair in point.attributes]
        return "chat" in operations

    found = collector.until(has_chat)
    duration = found.metrics["kvrelay-router", "gen_ai.server.request.duration"]
    assert duration.unit == "s"
    assert list(duration.histogram.data_points[0].explicit_bounds)[:3] == pytest.approx([0.01, 0.02, 0.04])
    for service in ("kvrelay-prefill", "kvrelay-decode"):
        collector.until(lambda found, name=service: (name, "kvrelay.queue.depth") in found.metrics)  # type: ignore[misc]
