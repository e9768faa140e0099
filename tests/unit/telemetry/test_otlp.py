"""What the standard variables ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrelay.telemetry.otlp import ExportImpossible, open_export, wanted_exporter

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
    if "OTEL_TRACES_EXPORTER" not in environ:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(ExportImpossible, match=named):
        open_export("router", "r", environ)


def test_without_a_word_of_it_no_exporter_is_imported() -> None:
    """Also not by what imports the whole of a service. (The client of Redis imports the SDK for its own ends.)"""
    script = (
        "import sys, kvrelay_router.server, kvrelay_prefill.service, kvrelay_decode.service\n"
        "from kvrelay.telemetry.otlp import open_export\n"
        "assert open_export('router', 'r', {}).tracer is None\n"
        "foreign = ('opentelemetry.exporter', 'opentelemetry.sdk.trace', 'kvrelay.telemetry.otlp_metrics')\n"
        "assert not [name for name in sys.modules if name.startswith(foreign)]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=110)
