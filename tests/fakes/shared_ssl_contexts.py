"""HTTP clients of one process share the certificates of the system.

Each client of httpx and openai reads them otherwise, for 40 ms, although almost no test uses TLS.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec


def share_ssl_contexts() -> None:
    """From now on clients with equal settings share an SSL context."""
    for library in filter(find_spec, ("httpx", "httpx2")):  # openai uses the second one, which need not be there
        transports = import_module(f"{library}._transports.default")
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)  # type: ignore[attr-defined]
