"""`kvrelay top`, from a router that answers what it is told."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from kvrelay.cli.top import view
from kvrelay.flag_parser import own_command
from tests.fakes.command import command
from tests.fakes.waiting import PATIENCE_S

top = command("top")

FLEET: dict[str, Any] = {
    "router": {"router_id": "router-7", "registry": "ok"},
    "requests": {"running": 3, "finished": 1234, "failed": 1, "retries": 2},
    "cache": {"prompt_tokens": 1000, "predicted_tokens": 300, "found_tokens": 250},
    "latency": {"requests": 5, "ttft_ms": {"p50": 10.0, "p90": 20.0, "p99": 30.0}, "tpot_ms": {}},
    "prefix_index": {"state": "current"},
    "fallback": {"active": True, "reason": "no prefill worker [is] ready"},
    "workers": [
        {
            "worker_id": "prefill-[red]0",  # a name is text, never markup
            "state": "ready",
            "queues": {"queued": 4, "computing": 1, "handed": 0, "queued_tokens": 999},
            "blocks": {"free": 5, "cached": 7, "computing": 8, "total": 20},
            "totals": {"prefill_tokens": 54321, "decode_tokens": 0},
            "device": "NVIDIA [b]H100 (GPU-5c89852c)",
            "kv_dtype": "fp8_e4m3",
        },
        {
            "worker_id": "decode-0",
            "state": "silent",
            "age_s": 2.1,
            "queues": {},
            "blocks": {},
            "totals": {},
        },
    ],
}


@pytest.fixture
def router() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("authorization") == "Bearer secret"
            body = json.dumps(FLEET if allowed else {}).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_it_shows_what_the_router_says(
    router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "secret")
    monkeypatch.setenv("COLUMNS", "80")
    assert top([router, "--once"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "router-7",
        "1234",
        "25.0 %",
        "30.0 % expected",
        "10.0 / 20.0 / 30.0 ms",
        "no prefill worker [is] ready",
    ):
        assert text in shown
    assert re.search(r"decode-0 +silent .*\n +2 s ", shown)
    named = ("prefill-[red]0", "NVIDIA", "[b]H100", "(GPU-5c89852c)", "KV fp8_e4m3")
    for text in (*named, "queued 4", "computing 1", "computing 8", "54.3k"):
        assert text in shown
    assert "999" not in shown and "handed" not in shown


def test_it_says_what_is_wrong(
    router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    assert top([router, "--once"]) == 1
    assert "/fleet answers 401: {}; set KVRELAY_API_KEY" in capsys.readouterr().err
    assert top(["http://127.0.0.1:1", "--once"]) == 1
    how = f"start one with `{own_command()} up`"
    expected = f"kvrelay top: http://127.0.0.1:1 does not answer (Connection refused); {how}"
    assert expected in capsys.readouterr().err
    for wrong in (["localhost:80"], ["--interval=0"], ["--interval=nan"]):
        with pytest.raises(SystemExit) as raised:
            top(wrong)
        assert raised.value.code == 2


def test_models_are_shown_one_after_the_other() -> None:
    workers = [{**each, "model": model} for model in ("one", "other") for each in FLEET["workers"]]
    own = {name: value for name, value in FLEET.items() if name != "workers"}
    other = {**own, "router": {"router_id": "router-7", "registry": "away"}}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view({"workers": workers, "models": {"one": own, "other": other}}))
    first, second = capture.get().split("\nother")
    assert first.startswith("one")
    assert first.count("decode-0") == second.count("decode-0") == 1
    assert "away" in second and "away" not in first


def test_q_ends_it(router: str) -> None:
    terminal, inner = pty.openpty()
    environ = {**os.environ, "KVRELAY_API_KEY": "secret", "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    shown_top = [sys.executable, "-m", "kvrelay", "top", router, "--interval", "3600"]
    process = subprocess.Popen(shown_top, stdin=inner, stdout=inner, stderr=inner, env=environ)
    os.close(inner)
    try:
        shown = b""
        while b"router-7" not in shown:
            assert select.select([terminal], [], [], PATIENCE_S)[0], shown
            shown += os.read(terminal, 65536)
        os.write(terminal, b"xq")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
