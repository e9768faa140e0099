"""Error answers: OpenAI's error object with an HTTP status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer. Content goes straight to orjson: the framework's own encoder takes seconds for long lists."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = headers or {}

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
        if name is None:
            raise
        raise ApiError(
            error.message.replace(f"'{error.param}'", f"'{name}'"),
            status=error.status,
            error_type=error.error_type,
            param=name,
            code=error.code,
            headers=error.headers,
        ) from None
