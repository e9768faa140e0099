"""The log-probabilities of a prompt on their way from the steps to the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrelay.protocol.messages import Prompt, PromptLogprobs
from kvrelay.protocol.packed_logprobs import packed_in_parts
from kvrelay.protocol.sampling import TokenLogprobs


class ScoreParts:
    """`add` returns the messages for what a step brought. For a router that does not take parts, it keeps everything in
    `kept` for the first token instead."""

    __slots__ = ("_in_parts", "_num_sent", "kept")

    def __init__(self, *, in_parts: bool) -> None:
        self.kept: list[TokenLogprobs] = []
        self._in_parts = in_parts
        self._num_sent = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> Iterator[PromptLogprobs]:
        """Takes the entries of the next positions. Send every message before the next call."""
        if not self._in_parts:
            self.kept += entries
            return
        for part in packed_in_parts(entries):
            message = PromptLogprobs(start=self._num_sent, part=part)
            self._num_sent += len(part)
            yield message

    def restart(self) -> None:
        """The prompt is computed again from its beginning."""
        self.kept.clear()
        self._num_sent = 0


def scores_of(prompt: Prompt) -> ScoreParts | None:
    """Returns None if the prompt's log-probabilities are not asked for."""
    return None if prompt.sampling.prompt_logprobs is None else ScoreParts(in_parts=prompt.scores_in_parts)
