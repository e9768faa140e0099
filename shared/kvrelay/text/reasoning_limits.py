"""What a worker must know of a model's tokens to limit its reasoning."""

from __future__ import annotations

from kvrelay.protocol.sampling import ReasoningChannels, ReasoningSpan
from kvrelay.text.output_parsing import harmony
from kvrelay.text.tokenizer import Tokenizer


def reasoning_span(
    tokenizer: Tokenizer, markers: tuple[str, str], *, is_open: bool, token_budget: int | None
) -> ReasoningSpan | None:
    """None if the markers are no single tokens."""
    begin_id, end_id = map(tokenizer.backend.token_to_id, markers)
    if begin_id is None or end_id is None:
        return None
    return ReasoningSpan(begin_id=begin_id, end_id=end_id, is_open=is_open, token_budget=token_budget)


def reasoning_channels(tokenizer: Tokenizer, *, is_open: bool, token_budget: int) -> ReasoningChannels | None:
    """The messages of harmony. None if their markers and the names of their channels are no single tokens."""
    names = harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.END, harmony.ANALYSIS, harmony.FINAL
    ids = [token_id for name in names if (token_id := tokenizer.backend.token_to_id(name)) is not None]
    if len(ids) < len(names):
        return None
    channel_id, message_id, start_id, end_id, reasoning_id, answer_id = ids
    role = tokenizer.encode(harmony.ASSISTANT, add_special_tokens=False)
    return ReasoningChannels(
        channel_id=channel_id,
        message_id=message_id,
        start_id=start_id,
        reasoning_id=reasoning_id,
        answer_id=answer_id,
        other_ids=tuple(tokenizer.encode(harmony.COMMENTARY, add_special_tokens=False)[:1]),
        closing_ids=(end_id, start_id, *role, channel_id),
        is_open=is_open,
        token_budget=token_budget,
    )
