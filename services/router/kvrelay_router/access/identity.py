"""Who sends a request: its ids, its API key, and the tenant of that key.

A tenant is one API key, or all keys that `key_limits_file` gives its name.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvrelay.config.router import RouterConfig
from kvrelay.telemetry.tracer import TraceContext
from kvrelay.text.request.api_error import ApiError, wrong

VALID_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestNames(msgspec.Struct, frozen=True):
    """The ids of a request.

    `public` is the client's own id if it sent a valid one, and is returned as `x-request-id`. Clients repeat their ids,
    for example in retries, so dispatch and workers see `unique`. `trace` is the W3C traceparent of the request's own
    span; it is empty if the request is no generation.
    """

    public: str
    unique: str
    trace: str
    key: str = ""  # the API key; empty if none are configured
    timeout: str = ""  # the value of `x-request-timeout`
    session: str = ""  # the value of `x-kvrelay-session`, not checked


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


# -- API keys ----------------------------------------------------------------------------------------------------------


class KeyRing:
    """The accepted API keys. Digests are compared, so the time reveals neither content nor length of a key."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Mapping[str, str]) -> str:
        """Returns the request's key, or an empty string if no keys are configured. Raises 401 for an unknown key."""
        if not self._digests:
            return ""
        given = _given_keys(headers)
        if not given:
            raise _unauthorized("You didn't provide an API key (Authorization: Bearer KEY, or x-api-key: KEY)", None)
        for key in given:
            digest = hashlib.sha256(key.encode()).digest()
            accepted = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(accepted):
                return key
        raise _unauthorized("Incorrect API key provided", "invalid_api_key")


def _given_keys(headers: Mapping[str, str]) -> list[str]:
    """Anthropic's clients send `x-api-key`, and may send another token as well."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return [key.strip() for key in given if key.strip()]


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"www-authenticate": "Bearer"})


# -- tenants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tenant:
    """`owner` identifies the key in records, `tenant` the tenant whose share of workers it uses, and `text_owner` the
    tenant whose texts it may learn of by the time that its own take. All are digests, and empty without keys.
    `cache_salt` comes before the request's own salt. `is_admin`: the key sees the requests of all keys."""

    owner: str = ""
    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    text_owner: str = ""
    is_admin: bool = False

    @property
    def visible_owner(self) -> str | None:
        """The owner whose requests this key may see. None: all."""
        return None if self.is_admin else self.owner

    def of_user(self, user: str) -> Tenant:
        """The share of one user of this tenant, with the tenant's weight."""
        if not user:
            return self
        digest = _digest("user", f"{self.tenant}/{user}")
        return replace(self, tenant=digest, text_owner=digest)


NO_KEYS = Tenant(is_admin=True)
"""Every client if no keys are configured."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of the configured keys. A key that is missing here is a tenant of its own."""

    of_keys: Mapping[str, Tenant] = field(default_factory=dict)
    by_user: bool = False

    @classmethod
    def from_config(cls, config: RouterConfig) -> Tenants:
        admins = frozenset(key.get_secret_value() for key in config.admin_api_keys)
        keys = dict.fromkeys([*(key.get_secret_value() for key in config.api_keys), *admins])
        own = config.own_key_limits()
        names = {key: entry.tenant for key, entry in own.items() if entry.tenant is not None}
        weights = {key: entry.weight for key, entry in own.items()}
        return cls(
            _tenants(keys, admins, names, weights, config),
            by_user=config.fair_queueing == "user",
        )

    @property
    def are_several(self) -> bool:
        """Returns whether requests may have different shares."""
        return self.by_user or len({each.tenant for each in self.of_keys.values()}) > 1

    def of(self, key: str, user: str = "") -> Tenant:
        """The tenant of a key that was checked, and its share for a user if users have shares."""
        tenant = (self.of_keys.get(key) or _unconfigured(key)) if key else NO_KEYS
        return tenant.of_user(user) if self.by_user else tenant


def _tenants(
    keys: Collection[str],
    admins: Collection[str],
    names: Mapping[str, str],
    weights: Mapping[str, float],
    config: RouterConfig,
) -> dict[str, Tenant]:
    tenants = {}
    for key in keys:
        # The kind of the text is part of the digest, so no tenant's name equals the tenant of a key without a name.
        tenant = _digest("tenant", names[key]) if key in names else _digest("key", key)
        tenants[key] = Tenant(
            owner=_digest("owner", key),
            tenant="" if config.fair_queueing == "off" else tenant,
            weight=weights.get(key, 1.0),
            cache_salt=f"tenant:{tenant}/" if config.key_cache_salt else "",
            text_owner=tenant,
            is_admin=key in admins,
        )
    return tenants


def _unconfigured(key: str) -> Tenant:
    tenant = _digest("key", key)
    return Tenant(owner=_digest("owner", key), tenant=tenant, text_owner=tenant)


def _digest(kind: str, text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8, person=f"kvrelay-{kind}".encode()).hexdigest()


def check_session(value: str) -> str:
    """Returns the value of the header `x-kvrelay-session`. Raises 400."""
    if value and VALID_REQUEST_ID.fullmatch(value) is None:
        allowed = "up to 128 printable ASCII characters without spaces"
        raise wrong("x-kvrelay-session", f"the header is {value[:32]!r} (allowed: {allowed})")
    return value
