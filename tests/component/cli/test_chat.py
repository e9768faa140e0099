"""`kvrelay chat`, against a server that answers with what it was asked."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvrelay.flag_parser import own_command
from tests.fakes.command import command

chat = command("chat")

ASKED: list[dict[str, Any]] = []


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ASKED.append(body)
            text = body["messages"][-1]["content"]
            if text == "refuse":
                self._answer(400, json.dumps({"error": {"message": "too long"}}).encode())
                return
            chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
            chunks += [{"choices": [{"delta": {"content": part}}]} for part in ("you said ", text)]
            if text == "break":
                chunks.append({"error": {"message": "the worker is lost"}})
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._answer(200, "".join([*events, "data: [DONE]\n\n"]).encode())

        def _answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    ASKED.clear()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_the_conversation_goes_on_until_it_is_reset(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "hello", "", "again", "/reset", "new", "/exit", "never")
    assert chat([server, "--system", "be brief", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == "you said hello\nyou said again\nyou said new\n"
    assert [[message["content"] for message in body["messages"]] for body in ASKED] == [
        ["be brief", "hello"],
        ["be brief", "hello", "you said hello", "again"],
        ["be brief", "new"],
    ]
    assert {(body["model"], body["max_tokens"], body["stream"]) for body in ASKED} == {("m", 7, True)}


@pytest.mark.parametrize(("line", "message"), [("refuse", "answers 400: too long"), ("break", "the worker is lost")])
def test_a_failed_request_is_said(
    server: str, line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, line)
    assert chat([server, "--model=m"]) == 1
    assert message in capsys.readouterr().err


def test_no_server_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "hello")
    assert chat(["http://127.0.0.1:1"]) == 1
    assert f"start one with `{own_command()} up`, or name its URL" in capsys.readouterr().err
