"""Who sends a request: its ids, and the caller to whom its API key belongs, with the caller's tenant.

A tenant is one API key, or all keys that `key_limits_file` gives its name.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request

from kvrelay.config.router import RouterConfig
from kvrelay.excerpts import quoted
from kvrelay.telemetry.tracer import TraceContext
from kvrelay.text.request.api_error import wrong

NAME_CHARS = 8
"""Of the digest that names a key without a name."""
VALID_REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of an API key, or, without keys, every client.

    `name` is what the access log and metrics call the key. `owner` identifies the key in records, `tenant` the tenant
    whose share of workers it uses, and `text_owner` the tenant whose texts it may learn of by the time that its own
    take. All three are digests, and empty without keys.
    `cache_salt` comes before the request's own salt. `is_admin`: the key sees the requests of all keys.
    """

    key: str = field(default="", repr=False)
    name: str = ""
    owner: str = ""
    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    text_owner: str = ""
    is_admin: bool = False
    has_users: bool = False  # each of its users has a share of its own, with the same weight

    @property
    def visible_owner(self) -> str | None:
        """The owner whose requests this key may see. None: all."""
        return None if self.is_admin else self.owner

    def share_of(self, user: str) -> Caller:
        """The caller as it is counted for a request of this user."""
        if not (user and self.has_users):
            return self
        digest = _digest("user", f"{self.tenant}/{user}")
        return replace(self, tenant=digest, text_owner=digest)


class RequestNames(msgspec.Struct, frozen=True):
    """The ids of a request, who sends it, and what its headers ask for.

    `public` is the client's own id if it sent a valid one, and is returned as `x-request-id`. Clients repeat their ids,
    for example in retries, so dispatch and workers see `unique`. `trace` is the W3C traceparent of the request's own
    span; it is empty if the request is no generation.
    """

    public: str
    unique: str
    trace: str
    timeout: str = ""  # the value of `x-request-timeout`
    session: str = ""  # the value of `x-kvrelay-session`, not checked
    caller: Caller = Caller()


def name_request(headers: Mapping[str, str], trace: TraceContext | None = None) -> RequestNames:
    """Uses the client's own values if they are valid, and generates the others."""
    own = headers.get("x-request-id", "")
    generated = secrets.token_hex(16)
    is_own = VALID_REQUEST_ID.fullmatch(own) is not None
    return RequestNames(
        public=own if is_own else generated,
        unique=f"{own}-{generated[:12]}" if is_own else generated,
        trace=str(trace) if trace is not None else "",
        timeout=headers.get("x-request-timeout", ""),
        session=headers.get("x-kvrelay-session", ""),
    )


@dataclass(frozen=True, slots=True)
class Callers:
    """The callers of the configured keys. A key that is missing here is a tenant of its own."""

    of_keys: Mapping[str, Caller] = field(default_factory=dict)
    by_user: bool = False

    @classmethod
    def from_config(cls, config: RouterConfig) -> Callers:
        admins = frozenset(key.get_secret_value() for key in config.admin_api_keys)
        keys = dict.fromkeys([*(key.get_secret_value() for key in config.api_keys), *admins])
        own, by_user = config.own_key_limits(), config.fair_queueing == "user"
        callers = {}
        for key in keys:
            limits = own.get(key)
            # The kind of the text is part of the digest, so no tenant's name equals the tenant of a key without a name.
            name = None if limits is None else limits.tenant
            tenant = _digest("key", key) if name is None else _digest("tenant", name)
            owner = _digest("owner", key)
            callers[key] = Caller(
                key=key,
                name=(limits and limits.name) or owner[:NAME_CHARS],
                owner=owner,
                tenant="" if config.fair_queueing == "off" else tenant,
                weight=1.0 if limits is None else limits.weight,
                cache_salt=f"tenant:{tenant}/" if config.key_cache_salt else "",
                text_owner=tenant,
                is_admin=key in admins,
                has_users=by_user,
            )
        return cls(callers, by_user)

    @property
    def have_shares(self) -> bool:
        """Returns whether requests may have different shares."""
        return self.by_user or len({each.tenant for each in self.of_keys.values()}) > 1

    def of(self, key: str) -> Caller:
        """The caller with a key that was checked; an empty key if none are configured."""
        if (caller := self.of_keys.get(key)) is not None:
            return caller
        if not key:
            return Caller(is_admin=True, has_users=self.by_user)
        digest, owner = _digest("key", key), _digest("owner", key)
        return Caller(
            key=key, name=owner[:NAME_CHARS], owner=owner, tenant=digest, text_owner=digest, has_users=self.by_user
        )


def names_of(http: Request) -> RequestNames:
    """The record that the middleware has made of a request."""
    names: RequestNames = http.scope["state"]["names"]
    return names


def _digest(kind: str, text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8, person=f"kvrelay-{kind}".encode()).hexdigest()


def check_session(value: str) -> str:
    """Returns the value of the header `x-kvrelay-session`. Raises 400."""
    if value and VALID_REQUEST_ID.fullmatch(value) is None:
        allowed = "up to 128 printable ASCII characters without spaces"
        raise wrong("x-kvrelay-session", f"the header is {quoted(value)} (allowed: {allowed})")
    return value


def check_timeout(value: str, longest_s: float) -> float:
    """Returns the seconds of the header `x-request-timeout`, at most `longest_s`. Raises 400."""
    if not value:
        return longest_s
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise wrong("x-request-timeout", f"the header is {quoted(value)} (allowed: seconds, more than 0)")
    return min(timeout_s, longest_s)
