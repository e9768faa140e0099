"""Outputs whose grammar forces how they begin: these tokens go to the workers with the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from kvrelay.protocol.sampling import Sampling
from kvrelay_router.dispatch.interface import GenerateRequest, ModelLimits
from kvrelay_router.text.grammar_check import GrammarCheck


def with_openings(
    requests: list[GenerateRequest], limits: ModelLimits, grammars: GrammarCheck
) -> list[GenerateRequest]:
    """The requests, whose grammars were checked, with their openings. All of them have the same grammar, if any."""
    if not limits.jump_forward:
        return requests
    grammar = next((each.sampling.grammar for each in requests if _may_be_forced(each.sampling)), None)
    if grammar is None or not (forced := grammars.opening(grammar)):
        return requests
    return [msgspec.structs.replace(each, opening=opening_of(each.sampling, forced)) for each in requests]


def opening_of(sampling: Sampling, forced: Sequence[int]) -> tuple[int, ...]:
    """The tokens that join an output at its beginning, of those that its grammar forces there. A worker samples at
    least one token behind them, and finds out what a stop token among them means."""
    if not _may_be_forced(sampling):
        return ()
    most = max(0, sampling.max_tokens - 1)
    return tuple(takewhile(lambda token_id: token_id not in sampling.stop_token_ids, forced[:most]))


def _may_be_forced(sampling: Sampling) -> bool:
    """As on workers, no token is forced that has a log-probability, or that limits of tokens may forbid, and the
    grammar has to begin with the output."""
    if sampling.grammar is None:
        return False
    has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    begins_later = sampling.reasoning is not None or sampling.channels is not None
    return not (has_logprobs or begins_later or sampling.limits_tokens or sampling.beams is not None)
