"""The router that a command talks to: its URL, or the stack of `kvrelay up` that runs here, and requests to it."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from kvrelay.cli.stacks import add_stack_flags, named_stack
from kvrelay.flag_parser import CommandFailed, no_answer

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVRELAY_API_KEY"


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the URL and the flags that name a stack."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        type=_url,
        help=f"the router (default: the stack that runs here, or {DEFAULT_URL})",
    )
    add_stack_flags(parser)


def router_url(arguments: argparse.Namespace) -> str:
    """The URL without a slash at its end. Raises CommandFailed."""
    if arguments.url is not None:
        return str(arguments.url)
    stack = named_stack(arguments)
    return DEFAULT_URL if stack is None else stack.url


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} must start with http:// or https://")
    return text.rstrip("/")


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
    """Sends GET, or POST with a body, with the key of `KEY_VARIABLE`. Returns the open answer, to be read and closed.
    Raises CommandFailed if the router refuses or does not answer."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        hint = f"; set {KEY_VARIABLE}" if error.code == 401 else ""
        raise CommandFailed(f"{url}{path} answers {error.code}: {_message(error.read())}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise CommandFailed(no_answer(url, error)) from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
