"""Tokens on their way to the routers: one message per step and router."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.protocol.messages import Handoff, PeerRef, SequenceUsage, TokenBatch, TokenEntry
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput


class TokenStream:
    """Collects the entries of a step and sends them as one message to each router. `totals` sums up what the entries
    say about the use of blocks."""

    def __init__(self, send: Callable[[PeerRef, TokenBatch], None]) -> None:
        self.totals: dict[str, float] = dict.fromkeys(
            ("prompt_blocks", "received_blocks", "cached_blocks", "computed_blocks"), 0
        )
        self._send = send
        self._pending: dict[PeerRef, list[TokenEntry]] = {}

    def put(self, router: PeerRef, entry: TokenEntry) -> None:
        """Adds an entry to the router's next message."""
        self._pending.setdefault(router, []).append(entry)
        if (usage := entry.usage) is not None:
            self.totals["prompt_blocks"] += usage.prompt_blocks
            self.totals["received_blocks"] += usage.received_blocks
            self.totals["cached_blocks"] += usage.cached_blocks
            self.totals["computed_blocks"] += usage.computed_blocks

    def flush(self) -> None:
        pending, self._pending = self._pending, {}
        for router, entries in pending.items():
            self._send(router, TokenBatch(entries=entries))


def entry_of(output: SequenceOutput, usage: SequenceUsage | None = None) -> TokenEntry:
    """The message entry for the output of a step. `usage`: for the first token of a prompt that was computed here."""
    key = output.sequence.key
    return TokenEntry(
        request=key[0],
        attempt=key[1],
        sequence=key[2],
        index=output.index,
        token_ids=[*output.token_ids],
        logprobs=[*output.logprobs],
        cached_tokens=output.sequence.num_cached_tokens if usage is not None else None,
        finish=output.finish,
        usage=usage,
        beams=list(output.beams),
    )


def first_entry_of(key: SequenceKey, handoff: Handoff, num_received: int, num_cached: int) -> TokenEntry:
    """The entry for the first token of a handoff, in case prefill's message with it was lost. `num_received` and
    `num_cached`: the prompt's blocks that were sent, and that decode had."""
    return TokenEntry(
        request=key[0],
        attempt=key[1],
        sequence=key[2],
        index=handoff.index,
        token_ids=[handoff.token_id] if handoff.token_id is not None else [],
        logprobs=[handoff.logprobs] if handoff.logprobs is not None else [],
        cached_tokens=handoff.cached_tokens,
        usage=SequenceUsage(
            prompt_blocks=num_received + num_cached, received_blocks=num_received, cached_blocks=num_cached
        ),
    )
