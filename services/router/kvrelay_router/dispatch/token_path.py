"""The token path connects the two pure classes of a sequence, `SequenceAttempts` and `TokenIntake`.

For each entry of a worker, three calls follow each other: `SequenceAttempts.accepts_tokens` checks the sender,
`TokenIntake.handle` returns the delta to deliver, and `token_events` returns the events for the attempt machine. For
log-probabilities of the prompt `SequenceAttempts.accepts_scores` is the first call.
"""

from __future__ import annotations

from kvrelay.protocol.messages import FirstToken, Header, TokenEntry
from kvrelay_router.dispatch.attempt import AttemptState, SequenceAttempts
from kvrelay_router.dispatch.events import (
    DecodeStarted,
    Event,
    FirstTokenDelivered,
    SequenceFinished,
)
from kvrelay_router.dispatch.interface import SequenceDelta


def token_events(attempts: SequenceAttempts, delta: SequenceDelta | None, from_prefill: bool) -> list[Event]:
    """Returns the events that the attempt machine must get after an entry: none between the first and the last tokens.

    `delta` is what the intake returned for the entry.
    """
    events: list[Event] = []
    if not from_prefill and attempts.state is AttemptState.PREFILLING:
        events.append(DecodeStarted())
    if delta is not None and not attempts.is_streaming:
        events.append(FirstTokenDelivered())
    if delta is not None and delta.finish is not None:
        events.append(SequenceFinished())
    return events


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
