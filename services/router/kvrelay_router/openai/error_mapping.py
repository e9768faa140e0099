"""The error answer for each failure of a request."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.text.request.api_error import ApiError, no_worker_ready
from kvrelay_router.dispatch.interface import NoWorkerReady, RequestFailed, TooLate
from kvrelay_router.http.error_response import error_response

logger = logging.getLogger(__name__)


def model_not_found(model: str) -> ApiError:
    """404 for a model that is not served here."""
    message = f"The model '{model}' does not exist; GET /v1/models lists the names that are served"
    return ApiError(message, status=404, param="model", code="model_not_found")


def too_many_requests(limit: int) -> ApiError:
    """429 while the maximum number of requests, or of those of one tenant, is in progress."""
    message = f"{limit} requests or your share of them are in progress, which is as many as this router takes"
    return ApiError(f"{message}; try again later", status=429, code="rate_limit_exceeded", retry_after_s=1)


_FAILURES: dict[FailureKind, tuple[int, str]] = {
    FailureKind.DEADLINE: (504, "request_timeout"),
    FailureKind.CANCELLED: (499, "request_cancelled"),
    FailureKind.TOO_LARGE: (400, "exceeds_worker_capacity"),
    FailureKind.NO_TOKEN_ALLOWED: (400, "no_token_allowed"),
    FailureKind.GRAMMAR_FAILED: (400, "grammar_failed"),
    FailureKind.BAD_LOGITS: (502, "bad_logits"),
    FailureKind.OUT_OF_MEMORY: (502, "out_of_memory"),
    FailureKind.DEVICE_LOST: (502, "device_lost"),
    FailureKind.ENGINE_ERROR: (502, "engine_error"),
    FailureKind.DRAINING: (503, "worker_draining"),
    FailureKind.WORKER_LOST: (502, "worker_lost"),
    FailureKind.NO_DECODE_WORKER: (503, "no_decode_worker"),
    FailureKind.PROTOCOL_ERROR: (502, "protocol_error"),
    FailureKind.NO_WORKER: (503, "no_worker_ready"),
    FailureKind.ROUTER_SHUTDOWN: (503, "router_shutdown"),
    FailureKind.INTERNAL_ERROR: (500, "internal_error"),
}
"""HTTP status and error code of a request that failed after it was accepted."""


def as_api_error(error: BaseException) -> ApiError:
    """Returns the error answer for an exception. Unexpected ones are logged; the client gets no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoWorkerReady):
        return no_worker_ready(str(error), error.retry_after_s)
    if isinstance(error, TooLate):
        return ApiError(str(error), status=429, code="deadline_unreachable", retry_after_s=error.retry_after_s)
    if isinstance(error, RequestFailed):
        status, code = _FAILURES[error.kind]
        return ApiError(str(error), status=status, code=code, retry_after_s=1 if status == 503 else None)
    if isinstance(error, TimeoutError):
        return ApiError("The request timed out", status=504, code="request_timeout")
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError("The server had an error while processing the request", status=500, code="internal_error")


async def on_api_error(request: Request, error: Exception) -> Response:
    """Exception handler of FastAPI for errors of endpoints."""
    return error_response(as_api_error(error), request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler of FastAPI for unknown routes and wrong methods."""
    status = getattr(error, "status_code", 500)
    headers = dict(getattr(error, "headers", None) or {})
    if status == 404:
        message, code = f"Unknown request URL: {request.method} {request.url.path}", "unknown_url"
    elif status == 405:
        message, code = f"Method {request.method} is not allowed for {request.url.path}", "method_not_allowed"
    else:
        message, code = str(getattr(error, "detail", error)), None
    return error_response(ApiError(message, status=status, code=code, headers=headers), request.url.path)
