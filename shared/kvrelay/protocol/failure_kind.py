"""Why a request failed: one enum for workers, router and clients."""

from __future__ import annotations

from enum import StrEnum


class FailureKind(StrEnum):
    """`Failed` and `/requests/{id}` carry it, and the HTTP status and error code are derived from it."""

    # The request itself.
    DEADLINE = "deadline"  # its time limit passed, on a worker or on the router
    CANCELLED = "cancelled"  # the client left
    TOO_LARGE = "too_large"  # the worker can never run it: its context or pool is too small
    NO_TOKEN_ALLOWED = "no_token_allowed"  # its grammar, allowed tokens and bad words leave no token to continue with
    GRAMMAR_FAILED = "grammar_failed"  # following its grammar takes more work than the limits allow

    # A step of the engine.
    BAD_LOGITS = "bad_logits"  # NaN or infinite logits
    OUT_OF_MEMORY = (
        "out_of_memory"  # of the device or the host in a step, or of the pool for as long as can be foreseen
    )
    DEVICE_LOST = "device_lost"  # the device accepts no more work from the worker's process
    ENGINE_ERROR = "engine_error"  # any other error of a step

    # The workers of an attempt.
    DRAINING = "draining"  # the worker is shutting down
    WORKER_LOST = "worker_lost"  # the link to the worker is gone, or the worker has forgotten the request
    NO_DECODE_WORKER = "no_decode_worker"  # prefill found no decode worker for its KV
    PROTOCOL_ERROR = "protocol_error"  # a message was sent that cannot be right

    # The router.
    NO_WORKER = "no_worker"  # none became ready in time
    ROUTER_SHUTDOWN = "router_shutdown"
    INTERNAL_ERROR = "internal_error"

    @property
    def recurs(self) -> bool:
        """Returns whether the request would fail in the same way on any other worker."""
        return self in (FailureKind.NO_TOKEN_ALLOWED, FailureKind.GRAMMAR_FAILED)
