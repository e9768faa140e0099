"""Exports traces and metrics over OTLP according to the standard `OTEL_*` variables. Imports the SDK only if needed.

A signal is exported if `OTEL_TRACES_EXPORTER` or `OTEL_METRICS_EXPORTER` is `otlp` or `console`, or if that variable is
not set and an endpoint is: `OTEL_EXPORTER_OTLP_ENDPOINT` or the signal's own. The SDK itself reads the other variables
(headers, timeouts, compression, certificates, batches, samplers, resource attributes).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from threading import Thread
from typing import Any, Literal, cast

from kvrelay.protocol.messages import HistogramReport
from kvrelay.telemetry.catalogue import METRICS, Metric
from kvrelay.telemetry.metrics import MetricSample, MetricSamples
from kvrelay.telemetry.tracer import Tracer

log = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]
PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
DEFAULT_METRIC_INTERVAL_MS = 60_000.0
CLOSE_TIMEOUT_S = 2.0
"""Time for the last batch, so that a hanging collector does not prevent the service from ending."""


class ExportImpossible(ValueError):
    """The environment configures an impossible export. The message names the variable."""


def wanted_exporter(signal: Signal, environ: Mapping[str, str]) -> Literal["otlp", "console"] | None:
    """The exporter configured in the environment for one signal. Raises ExportImpossible."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    name = f"OTEL_{signal.upper()}_EXPORTER"
    match environ.get(name, "").strip().lower():
        case "otlp":
            return "otlp"
        case "console":
            return "console"
        case "none":
            return None
        case "":
            own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
            return "otlp" if environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get(own) else None
        case other:
            raise ExportImpossible(f"{name} = {other!r}: must be otlp, console or none")


class Export:
    """The exports of a process. `tracer` is None if traces are not exported."""

    def __init__(self, tracer: Tracer | None = None, metrics: MetricsPush | None = None) -> None:
        self.tracer = tracer
        self._metrics = metrics

    def start(self, read: Callable[[], MetricSamples]) -> None:
        """Starts exporting the metrics that `read` returns. Call it on the event loop."""
        if self._metrics is not None:
            self._metrics.start(read)

    async def close(self) -> None:
        """Sends the remaining data within `CLOSE_TIMEOUT_S`."""
        if self._metrics is not None:
            await self._metrics.close()
        if self.tracer is not None:
            await _within(CLOSE_TIMEOUT_S, self.tracer.close, "the last spans")


def open_export(service: str, instance: str, environ: Mapping[str, str] | None = None) -> Export:
    """Opens the exports configured in the environment, possibly none. Raises ExportImpossible."""
    environ = os.environ if environ is None else environ
    traces, metrics = wanted_exporter("traces", environ), wanted_exporter("metrics", environ)
    if traces is None and metrics is None:
        return Export()
    try:
        resource = _resource(f"kvrelay-{service}", instance, environ)
        tracer = _batched(_exporter("traces", traces, environ), resource) if traces is not None else None
        push = MetricsPush(_exporter("metrics", metrics, environ), resource, environ) if metrics is not None else None
    except ImportError as error:
        raise ExportImpossible(
            f"OTEL_* variables ask for an export, and {error.name or error} is not installed: pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http (-grpc for OTEL_EXPORTER_OTLP_PROTOCOL=grpc)"
        ) from error
    log.info("OpenTelemetry: traces by %s, metrics by %s", traces or "nobody", metrics or "nobody")
    return Export(tracer, push)


def _batched(exporter: Any, resource: Any) -> Tracer:
    """A tracer with the SDK's batch thread."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracer(BatchSpanProcessor(exporter), resource)


def _resource(service: str, instance: str, environ: Mapping[str, str]) -> Any:
    """Resource attributes; those of the environment take precedence."""
    from opentelemetry.sdk.resources import Resource

    own = {"service.instance.id": instance, "service.version": version("kvrelay")}
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = service
    return Resource.create(own)


def _exporter(signal: Signal, kind: Literal["otlp", "console"], environ: Mapping[str, str]) -> Any:
    """Creates the SDK's exporter. Raises ImportError, ExportImpossible."""
    singular = {"traces": "Span", "metrics": "Metric"}[signal]
    if kind == "console":
        package = {"traces": "trace", "metrics": "metrics"}[signal]
        module = importlib.import_module(f"opentelemetry.sdk.{package}.export")
        return getattr(module, f"Console{singular}Exporter")()
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL"
    name = own if environ.get(own) else "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = environ.get(name, "http/protobuf")
    if protocol not in PROTOCOLS:
        raise ExportImpossible(f"{name} = {protocol!r}: must be {' or '.join(PROTOCOLS)}")
    part = {"traces": "trace", "metrics": "metric"}[signal]
    module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{PROTOCOLS[protocol]}.{part}_exporter")
    return getattr(module, f"OTLP{singular}Exporter")()


class MetricsPush:
    """Exports all samples of a process every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds, and once at the end.

    Samples are read on the event loop, which writes the instruments, and sent by a thread.
    """

    def __init__(self, exporter: Any, resource: Any, environ: Mapping[str, str]) -> None:
        self._exporter = exporter
        self._resource = resource
        self._interval_s = _interval_s(environ)
        self._started_ns = time.time_ns()
        self._read: Callable[[], MetricSamples] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, read: Callable[[], MetricSamples]) -> None:
        """Call it on the event loop."""
        self._read = read
        self._task = asyncio.create_task(self._run(), name="metrics-push")

    async def close(self) -> None:
        """Sends a last export within `CLOSE_TIMEOUT_S`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await _within(CLOSE_TIMEOUT_S, self._push(), "the last metrics")
        await _within(CLOSE_TIMEOUT_S, self._exporter.shutdown, "closing the metrics' exporter")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await asyncio.to_thread(self._push())
            except Exception:
                log.exception("exporting metrics failed")

    def _push(self) -> Callable[[], None]:
        """Reads the samples now and returns a function that sends them."""
        assert self._read is not None
        samples, now_ns = self._read(), time.time_ns()

        def send() -> None:
            self._exporter.export(metrics_data(samples, self._resource, self._started_ns, now_ns))

        return send


def metrics_data(samples: MetricSamples, resource: Any, started_ns: int, now_ns: int) -> Any:
    """Converts samples by metric name to the SDK's data. It is cumulative, like the samples; histograms keep their
    buckets, and have neither a least nor a greatest value. Raises KeyError for a metric that is not in the catalogue.
    """
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    cumulative, not_kept = sdk.AggregationTemporality.CUMULATIVE, cast("Any", None)

    def number(point: MetricSample, began_ns: int) -> sdk.NumberDataPoint:
        assert not isinstance(point.value, HistogramReport)
        return sdk.NumberDataPoint(dict(point.labels), began_ns, now_ns, point.value)

    def buckets(point: MetricSample) -> sdk.HistogramDataPoint:
        report = point.value
        assert isinstance(report, HistogramReport)
        labels, count = dict(point.labels), sum(report.counts)
        return sdk.HistogramDataPoint(
            labels, started_ns, now_ns, count, report.total, report.counts, report.bounds, not_kept, not_kept
        )

    def converted(metric: Metric, points: Sequence[MetricSample]) -> sdk.Metric:
        data: sdk.Sum | sdk.Gauge | sdk.Histogram
        if metric.kind == "histogram":
            data = sdk.Histogram([buckets(point) for point in points], cumulative)
        elif metric.kind == "counter":
            data = sdk.Sum([number(point, started_ns) for point in points], cumulative, is_monotonic=True)
        else:
            data = sdk.Gauge([number(point, 0) for point in points])
        return sdk.Metric(metric.name, metric.text, metric.unit, data)

    metrics = [converted(METRICS[name], samples[name]) for name in sorted(samples)]
    scope = sdk.ScopeMetrics(InstrumentationScope("kvrelay"), metrics, "")
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])


def _interval_s(environ: Mapping[str, str]) -> float:
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    try:
        interval_ms = float(environ.get(name, "") or DEFAULT_METRIC_INTERVAL_MS)
    except ValueError:
        interval_ms = 0.0
    if not interval_ms >= 1:
        raise ExportImpossible(f"{name} = {environ[name]!r}: must be a number of milliseconds, 1 or more")
    return interval_ms / 1000


async def _within(timeout_s: float, call: Callable[[], Any], what: str) -> None:
    """Runs `call` on a daemon thread and waits at most `timeout_s`, also at process exit. Logs its error as `what`."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        except Exception as error:
            log.warning("%s: %s", what, error)
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(done.set)

    Thread(target=run, name="telemetry-close", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except TimeoutError:
        log.warning("%s did not leave within %g s", what, timeout_s)
