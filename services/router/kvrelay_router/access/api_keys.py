"""Checks API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from kvrelay_router.http.api_error import ApiError


class KeyRing:
    """The accepted API keys. Digests are compared, so the time reveals neither content nor length of a key."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Mapping[str, str]) -> str:
        """Returns the request's key, or an empty string if no keys are configured. Raises 401 for an unknown key."""
        if not self._digests:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("You didn't provide an API key (Authorization: Bearer KEY)", None)
        digest = hashlib.sha256(key.strip().encode()).digest()
        accepted = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(accepted):
            raise _unauthorized("Incorrect API key provided", "invalid_api_key")
        return key.strip()


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"www-authenticate": "Bearer"})
