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
