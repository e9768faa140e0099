"""An OTLP collector: a small HTTP server that decodes what it is sent and keeps it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

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
