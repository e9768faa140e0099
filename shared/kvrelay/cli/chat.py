"""`kvrelay chat`: a conversation with a served model in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any

from kvrelay.cli.stacks import KEY_VARIABLE, add_router_arguments, ask, router_url
from kvrelay.flag_parser import CommandFailed, FlagParser, whole

TIMEOUT_S = 600.0
HELP = "/reset begins a new conversation, /exit or Ctrl-D ends."


def chat(argv: Sequence[str]) -> int:
    """Reads messages from standard input, one per line. Raises CommandFailed after a failed request."""
    arguments = chat_parser().parse(argv)
    url = router_url(arguments)
    model = arguments.model or first_model(url)
    if sys.stdin.isatty():
        print(f"{model} at {url}. {HELP}")
    with contextlib.suppress(KeyboardInterrupt):
        _converse(url, model, arguments.system, arguments.max_tokens)
    return 0


def chat_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay chat",
        f"Talks to a served model. A key, if one is needed, comes from {KEY_VARIABLE}. {HELP}",
        usage="kvrelay chat [URL] [flags]",
    )
    add_router_arguments(parser)
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the first that is served)")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=whole(1, 1 << 20), metavar="N", help="longest answer in tokens")
    return parser


def first_model(url: str) -> str:
    """Raises CommandFailed."""
    with ask(url, "/v1/models", timeout_s=TIMEOUT_S) as answer:
        try:
            name: str = json.load(answer)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise CommandFailed(f"{url} does not list its models: is it a router of kvrelay?") from None
    return name


def _converse(url: str, model: str, system: str | None, max_tokens: int | None) -> None:
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        parts = []
        for part in stream_answer(url, model, messages, max_tokens):
            parts.append(part)
            print(part, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": "".join(parts)})


def _lines() -> Iterator[str]:
    """The lines of standard input that are not empty."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            if line := input(prompt).strip():
                yield line


def stream_answer(
    url: str, model: str, messages: Sequence[dict[str, str]], max_tokens: int | None = None
) -> Iterator[str]:
    """The parts of the answer's content as they arrive. Raises CommandFailed."""
    body: dict[str, Any] = {"model": model, "messages": list(messages), "stream": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    try:
        with ask(url, "/v1/chat/completions", body, timeout_s=TIMEOUT_S) as answer:
            for line in answer:
                event = line.decode("utf-8").strip().removeprefix("data: ")
                if not line.startswith(b"data: ") or event == "[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise CommandFailed(str(chunk["error"].get("message", chunk["error"])))
                for choice in chunk.get("choices", ()):
                    yield choice["delta"].get("content") or ""
    except (OSError, HTTPException, ValueError) as error:
        raise CommandFailed(f"{url}: {error}") from error
