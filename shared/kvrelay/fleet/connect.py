"""Clients for a single Redis, Sentinels or a Cluster, selected by the URL's scheme.

- `redis://`, `rediss://`, `unix://`: one server, in redis-py's syntax.
- `redis+sentinel://[user:password@]host:port[,host:port...]/NAME[/db]`: the current primary of NAME.
- `redis+cluster://[user:password@]host:port`: a Cluster. All keys of one model are on one node.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.retry
import redis.sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvrelay.config.common import CLUSTER, SENTINEL, check_redis_url, sentinels

REDIS_AWAY = (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError, RuntimeError)
"""Exceptions of calls to a Redis that does not answer. A Cluster without a reachable node raises RedisClusterException,
which is not a RedisError. uvloop raises RuntimeError on a write to a broken connection, which redis-py does not catch.
"""

REDIS_FAILED = (RedisError, RedisClusterException, OSError, RuntimeError)
"""Exceptions of calls to a Redis that does not answer or that refuses."""


def connect(url: str, *, timeout_s: float) -> Any:
    """A blocking client without retries. Raises ValueError for an invalid URL."""
    times: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    retry = redis.retry.Retry(NoBackoff(), 0)
    scheme = urlsplit(check_redis_url(url)).scheme
    if scheme == SENTINEL:
        hosts, name, rest = sentinels(url)
        sentinel = redis.sentinel.Sentinel(hosts, sentinel_kwargs=times)  # type: ignore[no-untyped-call]
        return sentinel.master_for(name, **times, **rest)  # type: ignore[no-untyped-call]
    if scheme == CLUSTER:
        return redis.RedisCluster.from_url(_plain(url), **times)
    return redis.Redis.from_url(url, **times, retry=retry)


def connect_async(url: str, *, timeout_s: float) -> Any:
    """A client for an event loop. It reopens a dead pooled connection once."""
    times: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    scheme = urlsplit(check_redis_url(url)).scheme
    if scheme == SENTINEL:
        hosts, name, rest = sentinels(url)
        sentinel = redis.asyncio.sentinel.Sentinel(hosts, sentinel_kwargs=times)  # type: ignore[no-untyped-call]
        return sentinel.master_for(name, **times, **rest)
    if scheme == CLUSTER:
        return redis.asyncio.cluster.RedisCluster.from_url(_plain(url), **times)
    return redis.asyncio.Redis.from_url(url, **times, retry=redis.asyncio.retry.Retry(NoBackoff(), 1))


def _plain(url: str) -> str:
    return "redis" + url.removeprefix(CLUSTER)
