"""The accepted API keys, to whom they belong and what they may do; read again when their files change."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.config.router import RouterConfig
from kvrelay.config.table_files import OwnKeyLimits
from kvrelay.fleet.key_limits import KeyLimits
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.access.identity import Caller, Callers

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyRules:
    """`least_priority` is the smallest, and so most urgent, priority that a request may have."""

    limits: KeyLimits = field(default_factory=KeyLimits)
    least_priority: int | None = None


@dataclass(frozen=True, slots=True)
class AcceptedKeys:
    """None: no key is needed. `own` replaces `rules` for single keys."""

    keys: tuple[str, ...] = ()
    callers: Callers = field(default_factory=Callers)
    rules: KeyRules = field(default_factory=KeyRules)
    own: Mapping[str, KeyRules] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RouterConfig) -> AcceptedKeys:
        keys = tuple(key.get_secret_value() for key in (*config.api_keys, *config.admin_api_keys))
        rules = KeyRules(
            KeyLimits(config.key_requests_per_minute, config.key_burst, config.key_concurrency),
            config.key_least_priority,
        )
        own = {key: _own_rules(config, each) for key, each in config.own_key_limits().items()}
        return cls(keys, Callers.from_config(config), rules, own)


def _own_rules(config: RouterConfig, own: OwnKeyLimits) -> KeyRules:
    """The rules of a key with its own entry. Fields that the entry leaves out have the common values."""
    given = own.model_fields_set
    return KeyRules(
        KeyLimits(
            own.requests_per_minute if "requests_per_minute" in given else config.key_requests_per_minute,
            own.burst if "burst" in given else config.key_burst,
            own.concurrency if "concurrency" in given else config.key_concurrency,
        ),
        own.least_priority if "least_priority" in given else config.key_least_priority,
    )


class KeyRing:
    """Digests of keys are compared, so the time reveals neither content nor length of a key."""

    def __init__(self, accepted: AcceptedKeys | None = None) -> None:
        self.use(accepted or AcceptedKeys())

    def use(self, accepted: AcceptedKeys) -> None:
        """Accepts these keys, and no others, from now on. Requests that were admitted go on."""
        self.accepted = accepted
        self.have_shares = accepted.callers.have_shares  # each request asks for it
        self._digests = [hashlib.sha256(key.encode()).digest() for key in accepted.keys]

    def rules(self, key: str) -> KeyRules:
        return self.accepted.own.get(key, self.accepted.rules)

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller by the request's key. Raises 401 for an unknown key."""
        if not self._digests:
            return self.accepted.callers.of("")
        given = _given_keys(headers)
        if not given:
            raise _unauthorized("You didn't provide an API key (Authorization: Bearer KEY, or x-api-key: KEY)", None)
        for key in given:
            digest = hashlib.sha256(key.encode()).digest()
            accepted = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(accepted):
                return self.accepted.callers.of(key)
        raise _unauthorized("Incorrect API key provided", "invalid_api_key")


def _given_keys(headers: Mapping[str, str]) -> list[str]:
    """Anthropic's clients send `x-api-key`, and may send another token as well."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return [key.strip() for key in given if key.strip()]


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"www-authenticate": "Bearer"})


# -- files ------------------------------------------------------------------------------------------------------------


async def follow_key_files(config: RouterConfig, ring: KeyRing) -> None:
    """Reads the keys again whenever one of their files has changed and has then stayed the same for `LOOK_INTERVAL_S`,
    because it may be written in parts. Files with a fault leave the keys as they are. Runs until cancelled."""
    paths = config.key_files
    used: list[tuple[int, ...]] = []
    seen = [_state_of(path) for path in paths]  # they may have changed since the start read them
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        before, seen = seen, [_state_of(path) for path in paths]
        if seen == used or seen != before:
            continue
        used = seen
        try:
            accepted = await asyncio.to_thread(lambda: AcceptedKeys.of(config.read_again()))
        except ValueError as error:  # its message names no key
            log.error("the API keys stay as they were: %s", error)
            continue
        if accepted != ring.accepted:
            ring.use(accepted)
            log.info("%d API keys are accepted from now on", len(accepted.keys))


def _state_of(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size
