"""What the standard variables of tracing ask for, and which trace contexts are taken."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.telemetry.catalogue import METRICS
from kvrelay.telemetry.metrics import SECONDS, Histogram, MetricSample, MetricSamples
from kvrelay.telemetry.otlp import ExportImpossible, open_export, wanted_exporter
from kvrelay.telemetry.tracer import TraceContext, Tracer, new_trace, parse_traceparent, sampled, trace_fields
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({}, None, None),
        (ENDPOINT, "otlp", "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, "otlp", None),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, None, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console", None),
        ({"OTEL_METRICS_EXPORTER": " OTLP "}, None, "otlp"),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, None, "otlp"),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, None, None),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, "otlp", "otlp"),
    ],
)
def test_what_is_exported(environ: dict[str, str], traces: str | None, metrics: str | None) -> None:
    assert (wanted_exporter("traces", environ), wanted_exporter("metrics", environ)) == (traces, metrics)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER = 'zipkin': must be otlp, console or none"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL = 'http/json'"),
        (ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "soon"}, "OTEL_METRIC_EXPORT_INTERVAL = 'soon'"),
        (ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "nan"}, "OTEL_METRIC_EXPORT_INTERVAL = 'nan'"),
    ],
)
def test_what_cannot_be_done_is_said_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ExportImpossible, match=named):
        open_export("router", "r", environ)


def test_the_plain_install_can_export() -> None:
    """The packages of the exporters are dependencies, not an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {re.split(r"[<>=;\[ ]", each)[0] for each in project["dependencies"]}
    assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"} <= plain


def test_without_a_word_of_it_no_exporter_is_imported() -> None:
    """Also not by what imports the whole of a service. (The client of Redis imports the SDK for its own ends.)"""
    script = (
        "import sys, kvrelay_router.server, kvrelay_prefill.service, kvrelay_decode.service\n"
        "from kvrelay.telemetry.otlp import open_export\n"
        "assert open_export('router', 'r', {}).tracer is None\n"
        "foreign = ('opentelemetry.exporter', 'opentelemetry.sdk.trace')\n"
        "assert not [name for name in sys.modules if name.startswith(foreign)]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=2 * PATIENCE_S)


def every_metric() -> MetricSamples:
    histogram = Histogram("s", SECONDS)
    histogram.record(0.3)
    labels = (("a", "b"),)
    kinds: dict[str, Any] = {"histogram": histogram.report(), "counter": 3.0, "gauge": 2}
    return {name: [MetricSample(labels, kinds[metric.kind])] for name, metric in METRICS.items()}


def test_the_console_shows_spans_and_metrics() -> None:
    """In a process of its own: the SDK's exporters take its standard output as it is when they are imported."""
    script = """
import asyncio
from kvrelay.telemetry.otlp import open_export
from kvrelay.telemetry.tracer import new_trace
from tests.unit.telemetry.test_otlp import every_metric

async def main() -> None:
    export = open_export("decode", "d-7", {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "console"})
    export.start(every_metric)
    export.tracer.record("kvrelay.decode", new_trace(is_sampled=True), None, 1.0, 2.0)
    export.tracer.record("kvrelay.hidden", new_trace(is_sampled=False), None, 1.0, 2.0)
    await export.close()

asyncio.run(main())
"""
    command = [sys.executable, "-c", script]
    shown = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=2 * PATIENCE_S, cwd=ROOT
    ).stdout
    assert '"kvrelay.decode"' in shown and "kvrelay.hidden" not in shown
    assert "kvrelay-decode" in shown and "d-7" in shown
    assert all(f'"{name}"' in shown for name in METRICS)


def test_spans_arrive_as_they_were_recorded() -> None:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter), Resource.create())
    parent, link = new_trace(is_sampled=True), new_trace(is_sampled=True)
    context = parent.child()
    attributes: dict[str, Any] = {"kvrelay.attempt": 2, "kvrelay.route.reasons": ("a", "b")}
    tracer.record(
        "kvrelay.attempt", context, parent, 5.0, 7.5, kind="client", attributes=attributes, links=[link], error="lost"
    )
    found: Any = exporter.get_finished_spans()
    (span,) = found
    assert (span.name, span.kind.name, span.status.description) == ("kvrelay.attempt", "CLIENT", "lost")
    assert (span.context.trace_id, span.context.span_id) == (parent.trace_id, context.span_id)
    assert span.parent.span_id == parent.span_id
    assert [each.context.trace_id for each in span.links] == [link.trace_id]
    assert dict(span.attributes) == attributes
    assert span.end_time - span.start_time == pytest.approx(2.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("sampler", "root", "asked", "not_asked"),
    [
        ("", True, True, False),  # the default follows the client, and records what nobody has decided
        ("parentbased_always_off", False, True, False),
        ("always_off", False, False, False),
        ("always_on", True, True, True),
    ],
)
def test_the_standard_sampler_decides(
    monkeypatch: pytest.MonkeyPatch, sampler: str, root: bool, asked: bool, not_asked: bool
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    export = open_export("router", "r", {"OTEL_TRACES_EXPORTER": "console"})
    assert export.tracer is not None
    sent = new_trace(is_sampled=True), new_trace(is_sampled=False)
    begun = [export.tracer.begin(traceparent, "chat")[0] for traceparent in ("", str(sent[0]), str(sent[1]))]
    assert [context.is_sampled for context in begun] == [root, asked, not_asked]
    assert [context.trace_id for context in begun[1:]] == [each.trace_id for each in sent]


# -- w3c trace context -----------------------------------------------------------------------------------------------


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read_back(trace_id: int, span_id: int, is_sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, is_sampled)
    assert parse_traceparent(str(context)) == context
    assert sampled(str(context)) == (context if is_sampled else None)
    assert trace_fields(str(context)) == {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has four fields
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None
    assert sampled(text) is None
    assert trace_fields(text) == {}


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_the_sampled_flag_is_one_bit(flags: str, is_sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None and context.is_sampled is is_sampled


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    context = parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-then")
    assert context is not None and str(context) == f"00-{TRACE}-{SPAN}-01"


def test_a_child_is_of_the_same_trace_and_a_span_of_its_own() -> None:
    parent = new_trace(is_sampled=True)
    children = {parent.child() for _ in range(100)}
    assert {child.trace_id for child in children} == {parent.trace_id}
    assert len({child.span_id for child in children} | {parent.span_id}) == 101
