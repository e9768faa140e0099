"""Settings of the HTTP API, derived from the router's config."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.config.router import MAX_BODY_BYTES, RouterConfig
from kvrelay.config.table_files import OwnKeyLimits
from kvrelay.fleet.key_limits import KeyLimits
from kvrelay_router.access.identity import Tenants
from kvrelay_router.access.rate_limiter import KeyRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Requests may use any of `model_names`; answers carry the name that the request used."""

    model_names: tuple[str, ...]
    router_id: str = "router"
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may call the API; "*" allows all
    max_body_bytes: int = MAX_BODY_BYTES
    max_answer_bytes: int = 64 << 20
    request_timeout_s: float = 600.0
    max_requests: int = 1024  # maximum requests in progress; further ones get 429
    key_rules: KeyRules = field(default_factory=KeyRules)
    own_key_rules: Mapping[str, KeyRules] = field(default_factory=dict)  # replaces `key_rules` for single keys
    tenants: Tenants = field(default_factory=Tenants)
    max_sequences: int = 1024  # maximum prompts times choices of one HTTP request
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_config(cls, config: RouterConfig) -> ApiSettings:
        return cls(
            model_names=config.model_names,
            router_id=config.router_id,
            api_keys=tuple(key.get_secret_value() for key in (*config.api_keys, *config.admin_api_keys)),
            allowed_origins=config.allowed_origins,
            request_timeout_s=config.request_timeout_s,
            max_requests=config.max_queued_requests,
            key_rules=KeyRules(
                KeyLimits(config.key_requests_per_minute, config.key_burst, config.key_concurrency),
                config.key_least_priority,
            ),
            own_key_rules={key: _own_rules(config, each) for key, each in config.own_key_limits().items()},
            tenants=Tenants.from_config(config),
        )

    @property
    def model_name(self) -> str:
        return self.model_names[0]


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
