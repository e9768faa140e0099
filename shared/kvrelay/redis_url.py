"""URLs of a single Redis, of Sentinels and of a Cluster. `kvrelay.fleet.connect` has their forms."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

SENTINEL, CLUSTER = "redis+sentinel", "redis+cluster"
SCHEMES = ("redis", "rediss", "unix", SENTINEL, CLUSTER)
SENTINEL_PORT = 26379


def check_redis_url(url: str) -> str:
    """Returns the URL. Raises ValueError with the fault."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ValueError(f"must start with {', '.join(f'{each}://' for each in SCHEMES[:-1])} or {SCHEMES[-1]}://")
    if scheme == SENTINEL:
        sentinels(url)
    return url


def sentinels(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Sentinel addresses, the primary's name, and further connection arguments."""
    parts = urlsplit(url)
    user_info, _, addresses = parts.netloc.rpartition("@")
    hosts = []
    for address in addresses.split(","):
        host, _, port = address.rpartition(":") if ":" in address else (address, "", str(SENTINEL_PORT))
        if not host or not port.isdecimal():
            raise ValueError(f"{address!r} is not a sentinel address: use host:port")
        hosts.append((host.strip("[]"), int(port)))
    name, _, database = parts.path.strip("/").partition("/")
    if not name or (database and not database.isdecimal()):
        raise ValueError(f"{SENTINEL}://host:port/NAME is needed, or /NAME/DATABASE: the primary's name in sentinel")
    rest: dict[str, Any] = {"db": int(database or 0)}
    if user_info:
        user, _, password = user_info.partition(":")
        rest |= {"username": unquote(user) or None, "password": unquote(password)}
    return hosts, name, rest
