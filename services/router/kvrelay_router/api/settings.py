"""What the HTTP layer needs to know; made from the router's config."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Frozen settings of the HTTP layer. The first model name is the one that answers carry."""

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    request_timeout_s: float = 600.0
    max_sequences: int = 1024  # of one HTTP request: prompts times choices
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]
