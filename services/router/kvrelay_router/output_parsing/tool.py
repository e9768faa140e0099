"""The tools of a request."""

from __future__ import annotations

from typing import Any

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters`: a JSON schema of an object. `is_strict`: calls must follow it."""

    name: str
    parameters: dict[str, Any] = {}
    is_strict: bool = False
