"""Error answers: OpenAI's error object, or that of Anthropic's Messages API
(https://platform.claude.com/docs/en/api/errors) for its paths."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.http.body import BodyRefused, LingeringResponse


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer. Content goes straight to orjson: the framework's own encoder takes seconds for long lists."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """The error answer in the form of the API to which the path belongs."""
    status, body = error.status, error.body()
    if is_anthropic(path):
        status, body = anthropic_status(status), anthropic_error(error)
    response = LingeringResponse if isinstance(error, BodyRefused) else Response
    return response(orjson.dumps(body), status, error.headers, media_type="application/json")


# -- Anthropic's form -------------------------------------------------------------------------------------------------

MESSAGES_PATH = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Error types by status. Other client errors are invalid requests, and other failures of the server `api_error`."""

_STATUSES = {502: 500, 503: 529}
"""Statuses that Anthropic's API has in place of these."""


def is_anthropic(path: str) -> bool:
    """Returns whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": _TYPES.get(error.status, default), "message": error.message}}


def anthropic_status(status: int) -> int:
    """The status that Anthropic's API has in place of one of ours."""
    return _STATUSES.get(status, status)
