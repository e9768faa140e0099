"""The metrics of real services: all that is documented, and nothing else."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import httpx
import pytest

from kvrelay.config.common import demo_model_path
from kvrelay.config.router import RouterConfig
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.telemetry.catalogue import METRICS, Service
from kvrelay.telemetry.metrics import MetricSamples, prometheus_name
from kvrelay.worker.reports import unknown_totals
from kvrelay_router.server import RouterServer
from tests.fakes.hash_runner import HashRunner
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker

METRICS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ONLY_AFTER_A_DECISION = {"kvrelay.prefill_delay.outcomes"}


def documented(service: Service) -> set[str]:
    return {metric.name for metric in METRICS.values() if service in metric.services}


def check(samples: MetricSamples, service: Service) -> None:
    """Names and attributes are the catalogue's."""
    assert set(samples) | ONLY_AFTER_A_DECISION == documented(service) | ONLY_AFTER_A_DECISION
    for name, points in samples.items():
        for point in points:
            assert {label for label, _ in point.labels} <= set(METRICS[name].attributes), name
        if METRICS[name].kind != "histogram" and name != "kvrelay.handoff.failures":
            assert points or name.startswith("kvrelay.usage."), name
    assert all(
        METRICS[name].kind != "histogram" or not points or hasattr(points[0].value, "counts")
        for name, points in samples.items()
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_workers_page_has_what_is_documented(redis_server: EmbeddedRedis, role: Service) -> None:
    worker = LocalWorker(
        redis_server.url,
        role,
        HashRunner(num_blocks=16),
        redis_prefix=f"test-{secrets.token_hex(4)}",
        http_port=0,
        prefill_delayer=role == "decode",
    )
    await worker.start()
    check(worker.shell._metric_samples(), role)
    assert unknown_totals(worker.started.reports.status()) == set()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.shell._pages.port}") as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    titles = set(re.findall("^# TYPE (\\S+) ", answer.text, re.MULTILINE))
    assert titles | {prometheus_name(METRICS[name]) for name in ONLY_AFTER_A_DECISION} >= {
        prometheus_name(METRICS[name]) for name in documented(role)
    }
    await worker.stop()


async def test_a_routers_page_has_what_is_documented(redis_server: EmbeddedRedis) -> None:
    config = RouterConfig(
        model=str(demo_model_path()),
        redis_url=redis_server.url,
        redis_prefix=f"test-{secrets.token_hex(4)}",
        port=0,
        metrics_port=0,
    )
    server = RouterServer(config)
    await server.startup()
    try:
        assert server.pages is not None
        dispatcher = server._fleets[0].dispatcher
        await until(lambda: dispatcher.figures()["prefix_index"]["age_s"] is not None)
        check(server._metric_samples(), "router")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.pages.port}") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            assert "kvrelay_requests_active 0" in (await http.get("/metrics")).text.splitlines()
    finally:
        await server.shutdown()


def test_the_documentation_names_each_metric_once() -> None:
    """The table is generated; here it is held against the catalogue from the outside."""
    rows = re.findall(
        r"^\| `([a-z_.]+)` \([^)]*\) \| `(\w+)` \|", METRICS_PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(rows) == sorted((name, prometheus_name(metric)) for name, metric in METRICS.items())
