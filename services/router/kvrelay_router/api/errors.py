"""Errors as OpenAI's error object, with their HTTP status."""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.dispatch.interface import NoWorkerReady, RequestFailed, TooLate

logger = logging.getLogger(__name__)


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

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body(), self.status, self.headers)


def model_not_found(model: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(f"The model '{model}' does not exist", status=404, param="model", code="model_not_found")


def context_length_exceeded(message: str, param: str) -> ApiError:
    """400 for a request that the model's context cannot hold."""
    return ApiError(message, param=param, code="context_length_exceeded")


def no_worker_ready(message: str, retry_after_s: float) -> ApiError:
    """503 with Retry-After, in whole seconds."""
    return ApiError(
        message,
        status=503,
        error_type="server_error",
        code="no_worker_ready",
        headers={"retry-after": str(max(1, math.ceil(retry_after_s)))},
    )


def too_many_requests(limit: int) -> ApiError:
    """429 while as many requests are in progress as this router takes."""
    return ApiError(
        f"{limit} requests are in progress, which is as many as this router takes; try again later",
        status=429,
        error_type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": "1"},
    )


def as_api_error(error: BaseException) -> ApiError:
    """What the client is told about any exception. Unexpected ones are logged, and keep their details here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoWorkerReady):
        return no_worker_ready(str(error), error.retry_after_s)
    if isinstance(error, TooLate):
        return ApiError(
            str(error),
            status=429,
            error_type="rate_limit_error",
            code="deadline_unreachable",
            headers={"retry-after": str(max(1, math.ceil(error.retry_after_s)))},
        )
    if isinstance(error, RequestFailed):
        status, code = (504, "request_timeout") if error.timed_out else (502, "request_failed")
        return ApiError(str(error), status=status, error_type="server_error", code=code)
    if isinstance(error, TimeoutError):
        return ApiError("The request timed out", status=504, error_type="server_error", code="request_timeout")
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError(
        "The server had an error while processing the request",
        status=500,
        error_type="server_error",
        code="internal_error",
    )


async def on_api_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for everything that a route raises."""
    return as_api_error(error).response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler of the app for unknown routes and wrong methods."""
    status = getattr(error, "status_code", 500)
    headers = dict(getattr(error, "headers", None) or {})
    if status == 404:
        message, code = f"Unknown request URL: {request.method} {request.url.path}", "unknown_url"
    elif status == 405:
        message, code = f"Method {request.method} is not allowed for {request.url.path}", "method_not_allowed"
    else:
        message, code = str(getattr(error, "detail", error)), None
    return ApiError(message, status=status, code=code, headers=headers).response()
