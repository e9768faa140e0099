"""What a collector gets from real processes: one request is one trace of all services, and metrics come too."""

from __future__ import annotations

import gzip
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came. Ids in hexadecimal digits."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: list[str]
    failed: bool
    start_ns: int


@dataclass
class Collected:
    """All that came so far."""

    spans: list[CollectedSpan] = field(default_factory=list)
    metrics: dict[tuple[str, str], Any] = field(default_factory=dict)  # the latest, by service and name

    def of(self, trace_id: str, name: str = "") -> list[CollectedSpan]:
        found = [span for span in self.spans if span.trace_id == trace_id and (not name or span.name == name)]
        return sorted(found, key=lambda span: span.start_ns)

    def check_parents(self, trace_id: str, outermost_id: str) -> None:
        """All spans hang on the outermost one, which is the client's."""
        known = {span.span_id for span in self.of(trace_id)} | {outermost_id}
        lost = [span for span in self.of(trace_id) if span.parent_id not in known]
        assert not lost, lost


class Collector:
    """Listens on a free port of this machine; `endpoint` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.collected = Collected()
        self.lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                with collector.lock:
                    if self.path == "/v1/traces":
                        collector._take_spans(ExportTraceServiceRequest.FromString(body))
                    else:
                        collector._take_metrics(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def until(self, condition: Callable[[Collected], bool], timeout_s: float = PATIENCE_S) -> Collected:
        """Waits for what is to come."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self.lock:
                if condition(self.collected):
                    return self.collected
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come: {self.collected}")
            time.sleep(0.05)

    def _take_spans(self, request: Any) -> None:
        for resource_spans in request.resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self.collected.spans += [
                    CollectedSpan(
                        resource["service.name"],
                        resource["service.instance.id"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        _attributes(span.attributes),
                        [link.trace_id.hex() for link in span.links],
                        span.status.code == 2,
                        span.start_time_unix_nano,
                    )
                    for span in scope_spans.spans
                ]

    def _take_metrics(self, request: Any) -> None:
        for resource_metrics in request.resource_metrics:
            service = _attributes(resource_metrics.resource.attributes)["service.name"]
            for scope_metrics in resource_metrics.scope_metrics:
                for metric in scope_metrics.metrics:
                    self.collected.metrics[service, metric.name] = metric

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


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
