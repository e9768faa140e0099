"""What the HTTP layer needs to know; made from the router's config."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrelay.config.router import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Frozen settings of the HTTP layer. The first model name is the one that answers carry."""

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    request_timeout_s: float = 600.0
    max_requests: int = 1024  # in progress; beyond it new ones get 429
    max_sequences: int = 1024  # of one HTTP request: prompts times choices
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_config(cls, config: RouterConfig) -> ApiSettings:
        """The HTTP layer's part of the router's config."""
        return cls(
            model_names=(config.served_model_name,),
            api_keys=tuple(key.get_secret_value() for key in config.api_keys),
            max_body_bytes=int(config.max_body_bytes),
            request_timeout_s=config.request_timeout_s,
            max_requests=config.max_queued_requests,
        )

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]
