"""A real Prometheus scrapes a running fleet: every panel's and every alert's query finds data.

Needs a `prometheus` on the path, or KVRELAY_PROMETHEUS to name one.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from kvrelay.fleet.embedded import EmbeddedRedis
from tests.fakes.waiting import PATIENCE_S
from tests.unit.deploy.test_observability import OBSERVABILITY, dashboards, rules

PROMETHEUS = os.environ.get("KVRELAY_PROMETHEUS") or shutil.which("prometheus")
pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus is installed, and KVRELAY_PROMETHEUS names none"),
    pytest.mark.timeout(400),
]
DEADLINE_S = 150.0
PAGES = re.compile(r"http://127\.0\.0\.1:(\d+)/(?:health|metrics)")
SERVING = re.compile(r"serving \S+ at (http://\S+)")


def until(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what()}"
        time.sleep(0.2)
    return found


@contextmanager
def running(command: list[str], log: Path, environ: dict[str, str]) -> Iterator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environ})
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def said(log: Path, pattern: re.Pattern[str]) -> str:
    match = until(lambda: pattern.search(log.read_text()), lambda: f"{pattern.pattern} in:\n{log.read_text()[-3000:]}")
    return str(match[1])


@contextmanager
def fleet(directory: Path, model: Path, redis_url: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A router and a worker of each role: the router's URL, and where the pages of each are."""
    shared = ["--model", str(model), "--redis-prefix", f"test-{secrets.token_hex(4)}"]
    worker = ["--num-blocks", "64", "--dtype", "float32", "--threads", "1", "--http-port", "0", "--transfer", "zmq"]
    flags = {
        "router": ["--port", "0", "--metrics-port", "0", "--local-prefill-tokens", "0", "--max-queued-requests", "1"],
        "prefill": worker,
        "decode": worker,
    }
    with ExitStack() as stack:
        for service, own in flags.items():
            command = [sys.executable, "-m", f"kvrelay_{service}", *shared, *own]
            stack.enter_context(running(command, directory / f"{service}.log", {"KVRELAY_REDIS_URL": redis_url}))
        url = said(directory / "router.log", SERVING)
        pages = {service: f"127.0.0.1:{said(directory / f'{service}.log', PAGES)}" for service in flags}
        until(lambda: fleet_is_ready(url), lambda: f"workers: {httpx.get(f'{url}/fleet').text}")
        yield url, pages


def fleet_is_ready(url: str) -> bool:
    answer = httpx.get(f"{url}/ready")
    return answer.status_code == 200 and len(answer.json()["workers"]) == 2


@contextmanager
def prometheus(directory: Path, pages: dict[str, str]) -> Iterator[str]:
    """Scraping every second, with the rules that are shipped; its URL."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(OBSERVABILITY / "alerts.yml")],
        "scrape_configs": [
            {"job_name": f"kvrelay-{service}", "static_configs": [{"targets": [target]}]}
            for service, target in pages.items()
        ],
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    command = [str(PROMETHEUS), f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}"]
    with running([*command, "--web.listen-address=127.0.0.1:0"], directory / "prometheus.log", {}) as pid:
        listening = until(
            lambda: [c.laddr.port for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN],
            lambda: f"a port: {(directory / 'prometheus.log').read_text()[-2000:]}",
        )
        yield f"http://127.0.0.1:{listening[0]}"


def load(url: str) -> None:
    """Handoffs, shared prefixes, a request that fails, some that come when one is in progress."""
    prompts = [list(range(5, 60)) + [60 + number] * 8 for number in range(4)]
    with httpx.Client(base_url=url, timeout=2 * PATIENCE_S) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for prompt in prompts:
            http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 6}).raise_for_status()
        assert http.post("/v1/completions", json={"model": model, "prompt": "x", "n": -1}).status_code == 400
        together = {"model": model, "prompt": [5] * 50, "max_tokens": 50, "ignore_eos": True}
        with ThreadPoolExecutor(4) as clients:
            codes = [clients.submit(http.post, "/v1/completions", json=together) for _ in range(4)]
        assert {code.result().status_code for code in codes} <= {200, 429}


def operands(expression: str) -> list[str]:
    """What an alert compares. Each must have a value, also while nothing is wrong."""
    parts = re.split(r"\s(?:and|unless on \(\))\s", expression)
    inner = [part[1:-1] if part.startswith("(") and part.endswith(")") else part for part in parts]
    return [re.split(r"\s[<>]=?\s", part)[0] for part in inner]


def has_data(server: str, query: str) -> bool:
    answer = httpx.get(f"{server}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    return any(not math.isnan(float(sample["value"][1])) for sample in answer["data"]["result"])


def test_every_panel_and_alert_finds_data(
    tiny_model: Callable[[str], Path], tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    asked = {
        f"{name}: {panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "2m")
        .replace("$worker", ".*")
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel["targets"]
    }
    for rule in rules():
        name = rule.get("alert") or rule["record"]
        asked |= {f"{name} {number}": query for number, query in enumerate(operands(rule["expr"]))}
    with (
        fleet(tmp_path, tiny_model("llama"), redis_server.url) as (url, pages),
        prometheus(tmp_path, pages) as server,
    ):
        empty = dict(asked)

        def all_have_data() -> bool:
            load(url)
            for name, query in list(empty.items()):
                if has_data(server, query):
                    del empty[name]
            return not empty

        until(all_have_data, lambda: f"data of {json.dumps(empty, indent=1)}")
        answer = httpx.get(f"{server}/api/v1/rules").json()
        states = {rule["name"]: rule for group in answer["data"]["groups"] for rule in group["rules"]}
        assert len(states) == len(rules())
        assert {rule["health"] for rule in states.values()} == {"ok"}
        assert [name for name, rule in states.items() if rule.get("state") == "firing"] == []
