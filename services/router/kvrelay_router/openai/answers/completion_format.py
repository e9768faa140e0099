"""Text completions as server-sent events and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay.text.choice import Choice, TokenRecords
from kvrelay.text.request.completion_request import CompletionRequest
from kvrelay.text.service import DecodedPrompt
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.openai.answers.answer_format import (
    AnswerFormat,
    ChunkWriter,
    DocumentFormat,
    EventFormat,
)
from kvrelay_router.openai.answers.logprob_format import (
    TOKEN_IDS,
    completion_logprobs,
    prompt_scores,
)
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import PromptRun

NO_DETAILS = b'"logprobs":null,"finish_reason":null,"stop_reason":null'


def completion_format(
    service: ApiService,
    answer_id: str,
    request: CompletionRequest,
    runs: Sequence[PromptRun],
    echoed: Sequence[DecodedPrompt],
) -> AnswerFormat:
    """Returns the format that the request asks for. `echoed`: the prompts' texts, if the answer begins with them."""
    head = service.answer_head(answer_id, "text_completion", request.model)
    fields = _ChoiceFields(service.text.tokenizer, request, runs, echoed)
    return (CompletionStream if request.stream else CompletionAnswer)(head, request, runs, fields)


class CompletionStream(EventFormat):
    """`head`: the fields that all events begin with."""

    def __init__(
        self, head: dict[str, Any], request: CompletionRequest, runs: Sequence[PromptRun], fields: _ChoiceFields
    ) -> None:
        self._request, self._fields = request, fields
        self._chunks = ChunkWriter(head, request)
        self._opened: set[int] = set()
        # By choice: the bytes before and after its text. Filled only if events carry nothing but text.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        has_details = request.echo or request.return_token_ids or request.logprobs is not None or request.running_usage
        if not has_details:
            for choice in [choice for run in runs for choice in run.choices]:
                before = b'{"index":%d,"text":' % choice.index
                self._around_text[choice.index] = self._chunks.around(before, b",%b}" % NO_DETAILS)

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        text = choice.take_text()
        around = self._around_text.get(choice.index)
        if around is not None and choice.finish_reason is None:
            return b"".join((around[0], orjson.dumps(text), around[1])) if text else b""
        is_first = choice.index not in self._opened
        has_text = bool(text) or choice.finish_reason is not None
        if not has_text and not (is_first and self._request.echo):
            return b""
        self._opened.add(choice.index)
        # The records of withheld text wait for it: an event with the echoed prompt alone has none.
        records = choice.take_records() if has_text else TokenRecords()
        content = self._fields.of(run, choice, choice.index, text, records, is_first=is_first)
        return self._chunks.event(run, content, len(records.token_ids))

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the event with the usage, if it was asked for."""
        return self._chunks.last_event(usage)


class CompletionAnswer(DocumentFormat):
    """One JSON object with the best choices of each prompt."""

    def __init__(
        self, head: dict[str, Any], request: CompletionRequest, runs: Sequence[PromptRun], fields: _ChoiceFields
    ) -> None:
        self._head, self._request, self._runs, self._fields = head, request, runs, fields

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        contents: list[dict[str, Any]] = []
        for run in self._runs:
            scores = self._fields.prompt_scores(run, self._runs[0])
            for choice in self._best(run):
                text, records = choice.take_text(), choice.take_records()
                contents.append(self._fields.of(run, choice, len(contents), text, records, is_first=True))
                if scores is not None:
                    contents[-1]["prompt_logprobs"] = scores
        return {**self._head, "choices": contents, "usage": usage}

    def _best(self, run: PromptRun) -> list[Choice]:
        """The `n` of a prompt's `best_of` sequences with the highest mean log-probability, best first."""
        if self._request.num_sequences == self._request.n:
            return run.choices
        return sorted(run.choices, key=_mean_logprob, reverse=True)[: self._request.n]


class _ChoiceFields:
    """The fields of a choice, which an event and an answer in one piece share."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: CompletionRequest,
        runs: Sequence[PromptRun],
        echoed: Sequence[DecodedPrompt],
    ) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._echoed = {id(run): echo for run, echo in zip(runs, echoed, strict=False)}

    def of(
        self, run: PromptRun, choice: Choice, index: int, text: str, records: TokenRecords, *, is_first: bool
    ) -> dict[str, Any]:
        """`is_first`: the text begins the choice, so the fields of the prompt go with it."""
        echo = self._echoed.get(id(run)) if is_first else None
        content: dict[str, Any] = {
            "index": index,
            "text": text if echo is None else echo.text + text,
            "logprobs": self._logprobs(run, records, echo),
            **choice.ending,
        }
        if self._request.return_token_ids:
            content["token_ids"] = records.token_ids
            if is_first:
                content["prompt_token_ids"] = run.request.prompt_ids
        return content

    def prompt_scores(self, run: PromptRun, first_run: PromptRun) -> list[dict[str, Any] | None] | None:
        """None if the request does not ask for them."""
        num_top = self._request.prompt_logprobs
        return None if num_top is None else prompt_scores(self._tokenizer, num_top, run, first_run)

    def _logprobs(self, run: PromptRun, records: TokenRecords, echo: DecodedPrompt | None) -> dict[str, Any] | None:
        num_top = self._request.logprobs
        if num_top is None:
            return None
        texts = TOKEN_IDS if self._request.return_tokens_as_token_ids else self._tokenizer
        token_ids = [entry.token_id for entry in records.logprobs]
        offsets, logprobs = records.offsets, records.logprobs
        if echo is None:
            return completion_logprobs(texts, token_ids, offsets, logprobs, num_top)
        prompt_ids = run.request.prompt_ids[: 1 + len(run.prompt_logprobs)]
        entries = [None, *run.prompt_logprobs[:], *logprobs]
        offsets = echo.offsets[: len(prompt_ids)] + offsets
        return completion_logprobs(texts, prompt_ids + token_ids, offsets, entries, num_top)


def _mean_logprob(choice: Choice) -> float:
    return choice.logprob_sum / max(1, choice.num_tokens)
