"""Errors of a request or of its answer: an HTTP status and the fields of OpenAI's error object."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from kvrelay.excerpts import shortened

MAX_MESSAGE_CHARS = 1000
CLIENT_GONE_STATUS = 499
"""The status of requests that end because their client went away, or was cancelled."""


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
        self.message = shortened(message, MAX_MESSAGE_CHARS)  # which may quote a library that quotes the client
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


def wrong(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """The 400 for a field of the request."""
    return ApiError(f"Invalid value for '{param}': {reason}", param=param, code=code)


def context_length_exceeded(message: str, param: str) -> ApiError:
    """400 for a request that the model's context cannot hold."""
    return ApiError(message, param=param, code="context_length_exceeded")


def no_worker_ready(message: str, retry_after_s: float) -> ApiError:
    """503 with Retry-After, in whole seconds."""
    return ApiError(message, status=503, code="no_worker_ready", retry_after_s=retry_after_s)


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
