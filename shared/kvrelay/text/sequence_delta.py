"""What one sequence of a request brought since the last time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.protocol.messages import SequenceUsage
from kvrelay.protocol.packed_logprobs import CollectedLogprobs
from kvrelay.protocol.sampling import BeamResult, FinishReason, TokenLogprobs


class SequenceDelta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one sequence, in order, none twice. `logprobs` has one entry per token if asked for.

    `prompt_logprobs` (for prompt tokens 1, 2, ...) and `cached_tokens` come with a sequence's first delta.
    With `finish` STOP_TOKEN the last token is the end-of-sequence or stop token. With max_tokens 0 one delta comes,
    with no token, finish LENGTH and the prompt's logprobs. A beam search gives deltas without tokens: its `beams`, best
    first, with the best one's finish.
    """

    sequence: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] | CollectedLogprobs = ()
    cached_tokens: int | None = None
    finish: FinishReason | None = None
    usage: SequenceUsage | None = None
    beams: Sequence[BeamResult] = ()


def join_deltas(deltas: list[SequenceDelta]) -> SequenceDelta:
    """Joins at least one delta of one sequence, in order."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    cached_tokens = usage = None
    for delta in deltas:
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        if cached_tokens is None:
            cached_tokens = delta.cached_tokens
        if delta.usage is not None:
            usage = delta.usage
    return SequenceDelta(
        first.sequence, token_ids, logprobs or (), first.prompt_logprobs, cached_tokens, last.finish, usage, last.beams
    )
