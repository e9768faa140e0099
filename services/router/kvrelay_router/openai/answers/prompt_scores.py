"""Log-probabilities of a prompt's tokens beside its answer (`prompt_logprobs`), in vLLM's form."""

from __future__ import annotations

from typing import Any

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.http.json_parts import Rows
from kvrelay_router.openai.answers.logprob_format import finite
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.schema.generation_fields import GenerationFields
from kvrelay_router.text.tokenizer import Tokenizer


def most(*numbers: int | None) -> int | None:
    """Returns the largest number, or None if all are None."""
    return max((number for number in numbers if number is not None), default=None)


def prompt_scores(tokenizer: Tokenizer, request: GenerationFields) -> PromptScores | None:
    """Returns None if the request does not ask for `prompt_logprobs`."""
    return None if request.prompt_logprobs is None else PromptScores(tokenizer, request.prompt_logprobs)


class PromptScores:
    """Text completions have the scores in each choice, chat completions once in the answer. Streams have none."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top

    def of(self, run: PromptRun, first_run: PromptRun | None = None) -> Rows:
        """Returns one object per token, with token ids as keys, and None for tokens that are not scored: the first one,
        which follows nothing, and those before `logprob_start_len`. `first_run` has scored what the request's prompts
        have in common (`shared_scores`)."""
        before = run if first_run is None else first_run
        first, own_first = before.request.sampling.logprob_start_len, run.request.sampling.logprob_start_len

        def entries(start: int, stop: int) -> list[TokenLogprobs]:
            return [
                *before.prompt_logprobs[max(0, start - first) : max(0, min(stop, own_first) - first)],
                *run.prompt_logprobs[max(0, start - own_first) : max(0, stop - own_first)],
            ]

        def objects(start: int, stop: int) -> list[Any]:
            unscored = [None] * (min(first, stop) - start)
            return [*unscored, *map(self._of_token, entries(start, stop))]

        return Rows(own_first + len(run.prompt_logprobs), objects, 2 * (self._num_top + 1))

    def _of_token(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The most likely tokens, and the prompt's own token, whose rank is known only if it is one of them."""
        top = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._num_top]
        scores = {
            str(token_id): self._score(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(top, start=1)
        }
        scores.setdefault(str(entry.token_id), self._score(entry.token_id, entry.logprob, None))
        return scores

    def _score(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
