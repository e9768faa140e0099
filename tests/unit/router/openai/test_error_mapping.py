"""Every kind of failure has an HTTP status and an error code."""

from __future__ import annotations

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay_router.dispatch.interface import RequestFailed
from kvrelay_router.openai.delivery import as_api_error


def test_codes_tell_the_kinds_apart() -> None:
    codes = [as_api_error(RequestFailed("", kind)).code for kind in FailureKind]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.DEADLINE, 504, "request_timeout"),
        (FailureKind.TOO_LARGE, 400, "exceeds_worker_capacity"),
        (FailureKind.NO_TOKEN_ALLOWED, 400, "no_token_allowed"),
        (FailureKind.GRAMMAR_FAILED, 400, "grammar_failed"),
        (FailureKind.ENGINE_ERROR, 502, "engine_error"),
        (FailureKind.NO_WORKER, 503, "no_worker_ready"),
    ],
)
def test_statuses(kind: FailureKind, status: int, code: str) -> None:
    error = as_api_error(RequestFailed("", kind))
    assert (error.status, error.code) == (status, code)
