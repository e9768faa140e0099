"""The step of the token path that both pure classes of a sequence share: from a worker's entry to a delta. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import FirstToken, Header, PeerRef, TokenEntry
from kvrelay.protocol.sampling import FinishReason
from kvrelay.state_machine import IllegalEvent
from kvrelay_router.dispatch.attempt import AttemptState, SequenceAttempts
from kvrelay_router.dispatch.events import (
    AttemptFailed,
    DecodeStarted,
    Event,
    FirstTokenDelivered,
    SequenceFinished,
)
from kvrelay_router.dispatch.intake import TokenIntake
from kvrelay_router.dispatch.interface import SequenceDelta

NO_EVENTS: list[Event] = []


def receive_tokens(
    attempts: SequenceAttempts,
    intake: TokenIntake,
    worker: PeerRef,
    entry: TokenEntry,
    from_prefill: bool,
    handle_entry: Callable[[TokenEntry], SequenceDelta | None],
) -> tuple[SequenceDelta | None, list[Event]]:
    """Returns the delta to deliver, and then the events for the attempt machine: none for most entries.

    `handle_entry` is `intake.handle`, or that with a recording around it.
    Raises IllegalEvent if the worker cannot have sent this; then nothing has changed.
    """
    if not attempts.accepts_tokens(worker, entry.attempt, from_prefill):
        return None, NO_EVENTS
    if intake.prompt_logprobs_due:
        _check_prompt_logprobs(attempts, entry, from_prefill)
    delta = handle_entry(entry)
    if attempts.is_streaming and entry.finish is None and (delta is None or delta.finish is None):
        return delta, NO_EVENTS
    events: list[Event] = []
    if not from_prefill and attempts.state is AttemptState.PREFILLING:
        events.append(DecodeStarted())
    if delta is not None and not attempts.is_streaming:
        events.append(FirstTokenDelivered())
    if delta is not None and delta.finish is not None:
        events.append(SequenceFinished())
    elif entry.finish is FinishReason.ABORT:
        cause = f"{worker.peer_id} gave the sequence up"
        kind = FailureKind.WORKER_LOST
        events.append(AttemptFailed(worker, entry.attempt, len(intake.output), kind, cause, retriable=True))
    return delta, events


def entry_of(header: Header, first: FirstToken) -> TokenEntry:
    """Prefill's first token as an entry like those of decode."""
    return TokenEntry(
        request=header.request,
        attempt=header.attempt,
        sequence=header.sequence,
        index=first.index,
        token_ids=[] if first.token_id is None else [first.token_id],
        logprobs=[] if first.logprobs is None else [first.logprobs],
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        finish=first.finish,
        beams=first.beams,
    )


def _check_prompt_logprobs(attempts: SequenceAttempts, entry: TokenEntry, from_prefill: bool) -> None:
    """The worker that computed the prompt sends the prompt's log-probabilities with its first token."""
    computed_prompt = from_prefill or attempts.prefill is None
    if computed_prompt and entry.index == attempts.num_resumed and not entry.prompt_logprobs:
        raise IllegalEvent("the prompt's log-probabilities were asked for and did not come")
