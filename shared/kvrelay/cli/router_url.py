"""The router that a command talks to: its URL, or the stack of `kvrelay up` that runs here; and what to say of one that
does not answer."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

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


def start_one() -> str:
    """What to do if nothing listens at a URL."""
    return f"start one with `{own_command()} up`, or name its URL"


def own_command(*, from_anywhere: bool = False) -> str:
    """Returns `kvrelay` if the PATH leads to this installation, else the path of the script for a shell, such as
    `.venv/bin/kvrelay`: relative to the current directory if the script lies below it, unless `from_anywhere`."""
    python = Path(sys.executable)
    found = shutil.which("kvrelay")
    if found is not None and Path(found).resolve().parent == python.parent.resolve():
        return "kvrelay"
    script = python.with_name("kvrelay")
    program, arguments = (script, []) if script.exists() else (python, ["-m", "kvrelay"])
    if not from_anywhere:
        with suppress(FileNotFoundError):  # the current directory was deleted
            if program.is_relative_to(here := Path.cwd()):
                program = program.relative_to(here)
    return shlex.join([str(program), *arguments])
