"""Error answers: an HTTP status with OpenAI's error object, or with that of Anthropic's Messages API
(https://platform.claude.com/docs/en/api/errors) for its paths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer. Content goes straight to orjson: the framework's own encoder takes seconds for long lists."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


CLIENT_GONE_STATUS = 499
"""Of requests that end because their client went away, or was cancelled."""


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`retry_after_s`: for a header in whole seconds."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    @property
    def error_type(self) -> str:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < CLIENT_GONE_STATUS else "server_error"

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, body: dict[str, Any] | None = None) -> Response:
        """`body`: the error object of another API, in place of OpenAI's."""
        return json_response(self.body() if body is None else body, self.status, self.headers)


def wrong(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """The 400 for a field of the request."""
    return ApiError(f"Invalid value for '{param}': {reason}", param=param, code=code)


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Raises an ApiError about one of these fields again under the name of the field that the client sent."""
    try:
        yield
    except ApiError as error:
        name = None if error.param is None else names.get(error.param)
        if name is not None:
            error.message, error.param = error.message.replace(f"'{error.param}'", f"'{name}'"), name
        raise


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


def error_response(error: ApiError, path: str) -> Response:
    """The error answer in the form of the API to which the path belongs."""
    if not is_anthropic(path):
        return error.response()
    error.status = anthropic_status(error.status)
    return error.response(anthropic_error(error))
