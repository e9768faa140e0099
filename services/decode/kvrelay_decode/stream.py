"""Tokens on their way to the routers: one message a step and router."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.protocol.messages import PeerRef, SequenceUsage, TokenBatch, TokenEntry
from kvrelay.protocol.sampling import TokenLogprobs
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
        """Sends what was collected."""
        pending, self._pending = self._pending, {}
        for router, entries in pending.items():
            self._send(router, TokenBatch(entries=entries))


def entry_of(
    output: SequenceOutput, prompt_logprobs: list[TokenLogprobs] | None = None, usage: SequenceUsage | None = None
) -> TokenEntry:
    """The message entry for the output of a step. `usage`: for the first token of a prompt that was computed here."""
    key = output.sequence.key
    return TokenEntry(
        request=key[0],
        attempt=key[1],
        sequence=key[2],
        index=output.index,
        token_ids=[*output.token_ids],
        logprobs=[*output.logprobs],
        prompt_logprobs=prompt_logprobs or [],
        cached_tokens=output.sequence.num_cached_tokens if usage is not None else None,
        finish=output.finish,
        usage=usage,
        beams=list(output.beams),
    )
