"""`kvrelay health [URL]`: requests a service's page, for container health checks. It imports little because it runs
often."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException

from kvrelay.flag_parser import CommandFailed, FlagParser, cause, number

DEFAULT_URL = "http://127.0.0.1:8000/ready"
SHOWN_BYTES = 500


def health(argv: Sequence[str]) -> int:
    """Raises CommandFailed unless the page answers 2xx."""
    parser = health_parser()
    arguments = parser.parse(argv)
    if not arguments.url.startswith(("http://", "https://")):
        parser.error(f"{arguments.url!r} must start with http:// or https://")
    if not 0 < arguments.timeout <= 3600:
        parser.error("--timeout must be more than 0 and at most 3600")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a probe must not use a proxy
    try:
        with opener.open(arguments.url, timeout=arguments.timeout) as answer:
            print(answer.read(SHOWN_BYTES).decode("utf-8", "replace").strip())
    except urllib.error.HTTPError as error:
        said = error.read(SHOWN_BYTES).decode("utf-8", "replace").strip()
        raise CommandFailed(f"{arguments.url}: {error.code} {said}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise CommandFailed(f"{arguments.url} does not answer ({cause(error)})") from None
    return 0


def health_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay health",
        "Asks a page of a router (/ready, /health) or of a worker that has an http_port.",
        usage="kvrelay health [URL] [flags]",
    )
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"the page (default: {DEFAULT_URL})")
    parser.add_argument(
        "--timeout", type=number(0.001, 3600), default=2.0, metavar="SECONDS", help="how long to wait (default: 2)"
    )
    return parser
