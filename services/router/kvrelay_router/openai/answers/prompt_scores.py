"""Log-probabilities of a prompt's tokens beside its answer (`prompt_logprobs`), in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.openai.answers.answer_format import AnswerFormat, Collected
from kvrelay_router.openai.answers.logprob_format import finite
from kvrelay_router.openai.answers.running_usage import RunningUsage
from kvrelay_router.openai.generation import PromptRun, Step
from kvrelay_router.openai.schema.generation_fields import GenerationFields
from kvrelay_router.text.tokenizer import Tokenizer


def most(*numbers: int | None) -> int | None:
    """The largest of those that are given; None: none is."""
    return max((number for number in numbers if number is not None), default=None)


def extended(
    answer: AnswerFormat, request: GenerationFields, tokenizer: Tokenizer, runs: Sequence[PromptRun]
) -> AnswerFormat:
    """The format with what few requests ask for: usage in every event, or scores of the prompt."""
    if request.running_usage:
        return RunningUsage(answer)
    if request.prompt_logprobs is not None:
        return PromptScores(answer, tokenizer, runs, request.prompt_logprobs)
    return answer


class PromptScores:
    """Wraps the format of a whole answer. Completions have the scores in each choice, chats once for all."""

    def __init__(self, answer: AnswerFormat, tokenizer: Tokenizer, runs: Sequence[PromptRun], num_top: int) -> None:
        self._answer, self._tokenizer, self._runs, self._num_top = answer, tokenizer, runs, num_top

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer with the scores."""
        answer = self._answer.whole(choices, usage)
        scores = [self._scores(run) for run in self._runs]
        if answer["object"] == "chat.completion":
            return answer | {"prompt_logprobs": scores[0]}
        num_each = len(answer["choices"]) // len(scores)
        for number, choice in enumerate(answer["choices"]):
            choice["prompt_logprobs"] = scores[number // num_each]
        return answer

    def _scores(self, run: PromptRun) -> list[dict[str, Any] | None]:
        """One object a token, by token id; none for the first token, which follows nothing."""
        return [None, *map(self._of_token, run.prompt_logprobs)]

    def _of_token(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The likeliest tokens and the prompt's own, whose rank is only known where it is one of them."""
        top = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._num_top]
        scores = {
            str(token_id): self._score(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(top, start=1)
        }
        scores.setdefault(str(entry.token_id), self._score(entry.token_id, entry.logprob, None))
        return scores

    def _score(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def chunk(self, step: Step) -> bytes:
        """As without scores, which streams do not have."""
        return self._answer.chunk(step)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """See `AnswerFormat`."""
        return self._answer.around_text(index)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """See `AnswerFormat`."""
        return self._answer.usage_chunk(usage)
