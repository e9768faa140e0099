"""The requests that are open on a worker, and what both roles do alike about their beginning and their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from kvrelay.protocol.messages import AnyBody, Cancel, Failed, Header, PeerRef, Prompt, Stop
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.tracer import trace_fields
from kvrelay.worker.cancelled_requests import CancelledRequestCache
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequences import make_sequence, sequence_key

DEADLINE_GRACE_S = 5.0
"""The router ends a request at its deadline; a worker that heard nothing does so this much later."""


class OpenRequest(Protocol):
    """What a role's requests have in common."""

    @property
    def sequence(self) -> Sequence:
        """The sequence itself."""
        ...


RequestT = TypeVar("RequestT", bound=OpenRequest)


def deadline_of(prompt: Prompt) -> float:
    """When a worker ends this request on its own; monotonic seconds."""
    return time.monotonic() + prompt.timeout_s + DEADLINE_GRACE_S


class OpenRequests(Mapping[SequenceKey, RequestT]):
    """A role's requests by key. `cancel` is the role's way to end one of them; `role` names it in messages."""

    def __init__(self, context: WorkerContext, role: str, cancel: Callable[[SequenceKey, str], None]) -> None:
        self.cancel = cancel
        self.draining = False
        self.cancelled = CancelledRequestCache()
        self._context = context
        self._role = role
        self._open: dict[SequenceKey, RequestT] = {}
        self._samples: dict[str, dict[SequenceKey, RequestT]] = {}  # the same, by the router's request

    def __getitem__(self, key: SequenceKey) -> RequestT:
        return self._open[key]

    def get(self, key: SequenceKey | None, default: object = None) -> RequestT | None:  # type: ignore[override]
        """The request, or None."""
        return self._open.get(key) if key is not None else None

    def __iter__(self) -> Iterator[SequenceKey]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: RequestT) -> None:
        """It is open from now on."""
        key = request.sequence.key
        self._open[key] = request
        self._samples.setdefault(key[0], {})[key] = request

    def remove(self, key: SequenceKey) -> None:
        """It holds nothing here any more. One that is not known is fine."""
        request = self._open.pop(key, None)
        if request is None:
            return
        samples = self._samples[key[0]]
        del samples[key]
        if not samples:
            del self._samples[key[0]]

    def samples_of(self, request: str) -> Collection[RequestT]:
        """The router's request as it is open here: its samples, in any attempt, in the order in which they came."""
        samples = self._samples.get(request)
        return samples.values() if samples is not None else ()

    # -- the beginning ------------------------------------------------------------------------------------------------

    def queue(self, header: Header, router: PeerRef, prompt: Prompt, *, prefill_only: bool) -> Sequence | None:
        """A sequence of the router's, handed to the scheduler; older attempts of it end. None where there is none to
        start: it is known, cancelled, refused, or the worker drains. The router hears of the last two."""
        key = sequence_key(header)
        if key in self.cancelled or key in self._open:
            return None
        if self.draining:
            self.send(router, key, Failed(cause=f"the {self._role} worker is draining", retriable=True, refused=True))
            return None
        self.supersede(key)
        try:
            max_running = None if prefill_only else self._context.scheduler.limits.max_running
            sequence = make_sequence(header, prompt, router, self._context.spec, max_running)
            sequence.prefill_only = prefill_only
            if prefill_only:
                sequence.sample_group = ""  # it leaves with its first token, whatever becomes of the others
            self._context.steps.add(sequence)
        except (ValueError, OverflowError) as error:
            self.send(router, key, Failed(cause=str(error), retriable=False))
            return None
        return sequence

    def supersede(self, key: SequenceKey) -> None:
        """A newer attempt of the same sequence ends the older ones."""
        for other in [k for k in self._samples.get(key[0], ()) if k[2] == key[2] and k[1] < key[1]]:
            self.cancel(other, "a newer attempt took over")

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, key: SequenceKey, body: Stop | Cancel) -> None:
        """The router ends it. Remembered, so that a request that comes later than its end is not started."""
        self.cancel(key, body.reason if isinstance(body, Cancel) else "a stop string matched")
        self.cancelled.add(key, time.monotonic())

    def log_fields(self, key: SequenceKey | None) -> dict[str, Any]:
        """For the `extra` of a log line about a sequence; nothing of one that is not open here."""
        request = self.get(key)
        if request is None:
            return {}
        request_id, attempt, index = request.sequence.key
        fields = {"request_id": request_id, "attempt": attempt, "sequence": index}
        return fields | trace_fields(request.sequence.trace)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, peer: PeerRef, key: SequenceKey, body: AnyBody) -> None:
        """A message about a sequence, with its trace where the sequence is open here."""
        request = self._open.get(key)
        trace = request.sequence.trace if request is not None else ""
        self._context.messenger.send(peer, body, request=key[0], attempt=key[1], sequence=key[2], trace=trace)
