"""Text completions: plans the texts behind one or several prompts, and writes them as events or as one JSON object."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

import orjson

from kvrelay.text.choice import Choice, TokenRecords
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.completion_request import (
    CompletionRequest,
    PromptItem,
    too_many_completions,
)
from kvrelay.text.request.validation import (
    ModelLimits,
    completion_output,
)
from kvrelay.text.service import DecodedPrompt, TextService
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.answer_format import (
    TOKEN_IDS,
    CompletionsFormat,
    completion_logprobs,
    prompt_scores,
)
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.planning import (
    EndpointFields,
    Plan,
    TokenizedPrompt,
    check_request,
    plan_generation,
    prompt_tokens,
)


async def plan_completion(
    service: ApiService, names: RequestNames, request: CompletionRequest
) -> tuple[Plan, list[DecodedPrompt]]:
    """The plan, and the prompts' texts if the answer begins with them. Raises ApiError for every mistake in the
    request."""
    limits = await check_request(service, names, request)
    num_each = max(request.num_sequences, request.best_of or 1)
    if len(request.prompt) * num_each > service.settings.max_sequences:
        raise too_many_completions(service.settings.max_sequences)
    if request.grammar is not None:
        await service.check_grammar(request.grammar, request.grammar_param, request.whitespace_param)
    if request.suffix:
        request = _ended_by_markers(service.text, request, limits)
    fields = _endpoint_fields(service, request)
    prompts, share = [], LoopShare()
    for item in request.prompt:
        prompts.append(await _prompt(service.text, item, request, fields, limits))
        await share.pause()
    plan = await plan_generation(service, names, request, fields, prompts, limits)
    return plan, [prompt.echo for prompt in prompts if prompt.echo is not None]


def _ended_by_markers(text: TextService, request: CompletionRequest, limits: ModelLimits) -> CompletionRequest:
    """The request, with the tokens that end a text before the suffix. Raises 400 if the model has none for this."""
    if text.fill_in_middle is None:
        raise wrong(
            "suffix",
            "the model's tokenizer has no tokens for filling in the middle, as those of Qwen2.5-Coder, Code Llama, "
            "StarCoder and DeepSeek Coder have",
            "unsupported_parameter",
        )
    ends = [token_id for token_id in text.fill_in_middle.end_ids if token_id < limits.vocab_size]
    return request.model_copy(update={"stop_token_ids": [*request.stop_token_ids, *ends]})


async def _prompt(
    text: TextService, item: PromptItem, request: CompletionRequest, fields: EndpointFields, limits: ModelLimits
) -> TokenizedPrompt:
    """Tokenizes the prompt, truncates it, and adds the text to echo."""
    special = request.add_special_tokens

    def encode(prefix: str, max_tokens: int | None) -> Awaitable[list[int]]:
        if request.suffix and (model := text.fill_in_middle) is not None:
            longest = limits.max_model_len
            return text.encode_around(model, prefix, request.suffix, add_special_tokens=special, max_tokens=longest)
        return text.encode(prefix, add_special_tokens=special, max_tokens=max_tokens)

    prompt = partial(encode, item) if isinstance(item, str) else item
    token_ids = await prompt_tokens(request, fields, limits, text.tokenizer.vocab_size, prompt)
    kept = request.truncated(token_ids, fields.output.prompt_room(limits))
    if not request.echo:
        return TokenizedPrompt(kept)
    if isinstance(item, str) and len(kept) == len(token_ids):
        return TokenizedPrompt(kept, await text.locate_tokens(item, add_special_tokens=special))
    return TokenizedPrompt(kept, await text.decode_prompt(kept, skip_special_tokens=request.skip_special_tokens))


def _endpoint_fields(service: ApiService, request: CompletionRequest) -> EndpointFields:
    # The choices of `best_of` are ranked by their log-probabilities, so these are always computed.
    is_ranked = request.num_sequences > request.n
    echoed = request.logprobs if request.echo else None
    return EndpointFields(
        prompt_param="prompt",
        output=completion_output(request, service.text.sampling_defaults),
        logprobs=0 if is_ranked and request.logprobs is None else request.logprobs,
        prompt_logprobs=max((each for each in (request.prompt_logprobs, echoed) if each is not None), default=None),
        echo_logprobs=echoed,
        has_echo=request.echo,
        scores_in_choices=True,
    )


NO_DETAILS = b'"logprobs":null,"finish_reason":null,"stop_reason":null'


class CompletionFormat(CompletionsFormat):
    def __init__(
        self,
        service: ApiService,
        answer_id: str,
        request: CompletionRequest,
        runs: Sequence[PromptRun],
        echoed: Sequence[DecodedPrompt],
    ) -> None:
        """`echoed`: the prompts' texts, if the answer begins with them."""
        head = service.answer_head(answer_id, "text_completion", request.model)
        super().__init__(head, service.text.tokenizer, request, runs)
        self._request = request
        self._echoed = {id(run): echo for run, echo in zip(runs, echoed, strict=False)}
        has_details = request.echo or request.return_token_ids or request.logprobs is not None or request.running_usage
        if request.stream and not has_details:
            for choice in [choice for run in runs for choice in run.choices]:
                before = b'{"index":%d,"text":' % choice.index
                self._around_text[choice.index] = self._around(before, b",%b}" % NO_DETAILS)

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
        content = self._fields(run, choice, choice.index, text, records, is_first=is_first)
        return self._event(run, content, len(records.token_ids))

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        contents: list[dict[str, Any]] = []
        for run in self._runs:
            num_top = self._request.prompt_logprobs
            scores = None if num_top is None else prompt_scores(self._tokenizer, num_top, run, self._runs[0])
            for choice in self._best(run):
                text, records = choice.take_text(), choice.take_records()
                content = self._fields(run, choice, len(contents), text, records, is_first=True)
                contents.append({**content, "prompt_logprobs": scores})
        return {**self._head, "choices": contents, "usage": usage}

    def _best(self, run: PromptRun) -> list[Choice]:
        """The `n` of a prompt's `best_of` sequences with the highest mean log-probability, best first."""
        if self._request.num_sequences == self._request.n:
            return run.choices
        return sorted(run.choices, key=_mean_logprob, reverse=True)[: self._request.n]

    def _fields(
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
