"""The router that a command talks to: its URL, or the stack of `kvrelay up` that runs here."""

from __future__ import annotations

import argparse

from kvrelay.cli.stack_state import add_stack_flags, named_stack

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
    """The URL without a slash at its end. Raises NoStack."""
    if arguments.url is not None:
        return str(arguments.url)
    stack = named_stack(arguments)
    return DEFAULT_URL if stack is None else stack.url


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} must start with http:// or https://")
    return text.rstrip("/")
