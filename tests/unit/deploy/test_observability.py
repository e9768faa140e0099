"""Dashboards and alert rules: written from their source, about metrics and labels that exist, tested by promtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.telemetry.catalogue import METRICS
from kvrelay.telemetry.metrics import prometheus_name

DEPLOY = Path(__file__).parents[3] / "deploy"
OBSERVABILITY = DEPLOY / "observability"
OF_PROMETHEUS = {"job", "instance", "le", "model"}  # and of a router with several models
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
LABELS = {
    prometheus_name(metric) + suffix: {name.replace(".", "_") for name in metric.attributes} | OF_PROMETHEUS
    for metric in METRICS.values()
    for suffix in SUFFIXES[metric.kind]
} | {"up": OF_PROMETHEUS}


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (OBSERVABILITY / "grafana" / "dashboards").iterdir()}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and PromQL; of everything that asks Prometheus."""
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
    for rule in rules():
        yield str(rule.get("alert") or rule["record"]), rule["expr"]
    autoscaling = DEPLOY / "kubernetes" / "components" / "autoscaling" / "workers.yaml"
    for scaled in yaml.safe_load_all(autoscaling.read_text()):
        yield str(scaled["metadata"]["name"]), scaled["spec"]["triggers"][0]["metadata"]["query"]


def test_dashboards_are_up_to_date() -> None:
    command = [sys.executable, str(OBSERVABILITY / "dashboards.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_rules_for_the_prometheus_operator_are_up_to_date() -> None:
    directory = DEPLOY / "kubernetes" / "components" / "monitoring"
    resource = subprocess.run([directory / "make-rules"], capture_output=True, text=True, check=True).stdout
    assert resource == (directory / "rules.yaml").read_text(), "write it with make-rules"
    assert (
        yaml.safe_load(resource)["spec"]["groups"]
        == yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
    )


def test_every_query_is_about_metrics_and_labels_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    found = list(queries())
    assert len(found) > 60
    for where, query in found:
        for name in re.findall(r"kvrelay:[\w:]+", query):
            assert name in recorded, f"{where}: {name}"
        bare = re.sub(r'"[^"]*"|kvrelay:[\w:]+', '""', query)
        named = re.sub(r"by \([^)]*\)", "", bare)
        metrics = re.findall(r"\b(?:kvrelay_\w+|gen_ai_\w+|process_\w+|up\b)", named)
        assert metrics or "kvrelay:" in query, f"{where}: {query}"
        known = set[str]()
        for metric in metrics:
            assert metric in LABELS, f"{where}: no metric {metric}"
            known |= LABELS[metric]
        matched = {name for part in re.findall(r"\{([^}]*)\}", bare) for name in re.findall(r"(\w+)\s*[=!]", part)}
        grouped = {name for part in re.findall(r"by \(([^)]*)\)", bare) for name in re.findall(r"\w+", part)}
        assert matched | grouped <= known, f"{where}: {(matched | grouped) - known} are no labels of {metrics}"


def test_panels_lie_side_by_side() -> None:
    for name, board in dashboards().items():
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len(places), name
        assert all(x + panel["gridPos"]["w"] <= 24 for (x, _), panel in zip(places, board["panels"], strict=True))
        assert len({panel["title"] for panel in board["panels"]}) == len(places), name


def test_every_alert_has_a_test() -> None:
    tested = (OBSERVABILITY / "alerts_test.yml").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        assert tested.count(rule["alert"]) >= 2, f"{rule['alert']} needs a test in which it fires, and a silent one"
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    command = [promtool, "test", "rules", "alerts_test.yml"]
    done = subprocess.run(command, cwd=OBSERVABILITY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_scrapes_what_compose_runs() -> None:
    jobs = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for job in jobs:
        (discovery,) = job["dns_sd_configs"]
        (name,) = discovery["names"]
        behind = [each for each, service in services.items() if name == each or name in _aliases(service)]
        assert len(behind) == (1 if name == "router" else 3), f"{name} has no service in some profile"
        for each in behind:
            environment = services[each]["environment"]
            port = "KVRELAY_METRICS_PORT" if name == "router" else "KVRELAY_HTTP_PORT"
            assert environment[port] == str(discovery["port"])
            assert environment["KVRELAY_HOST"] == "0.0.0.0" and "KVRELAY_MESSAGE_HOST" not in environment


def _aliases(service: dict[str, Any]) -> list[str]:
    networks = service["networks"]
    return networks["inside"]["aliases"] if isinstance(networks, dict) else []
