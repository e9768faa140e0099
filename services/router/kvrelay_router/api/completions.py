"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.api.admission import (
    OutputLimits,
    allowed_output,
    check_beams,
    check_model,
    check_samples,
    check_scores,
    check_token_ids,
    check_tokenized,
    check_vocabulary,
    known_limits,
    make_requests,
    make_sampling,
    make_seed,
)
from kvrelay_router.api.answer import Collected, beam_scores
from kvrelay_router.api.body import read_json_object
from kvrelay_router.api.choice import Choice, Piece, StopRules
from kvrelay_router.api.delivery import GenerationResponse
from kvrelay_router.api.errors import ApiError
from kvrelay_router.api.generation import PromptRun, Step
from kvrelay_router.api.logprobs import ScoredToken, completion_logprobs
from kvrelay_router.api.prompt_scores import extended, most
from kvrelay_router.api.schema.completion import DEFAULT_MAX_TOKENS, CompletionRequest, parse_completion
from kvrelay_router.api.service import ApiService
from kvrelay_router.dispatch.interface import ModelLimits
from kvrelay_router.text.service import DecodedPrompt, TextService

NOTHING_ELSE = b'"logprobs":null,"finish_reason":null,"stop_reason":null'


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request as tokens; with `echo`, also as the text that answers begin with."""

    token_ids: list[list[int]]
    echoed: list[DecodedPrompt]


class CompletionsEndpoint:
    """Serves text completions."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def serve(self, http: Request) -> Response:
        """Validates everything, then hands over to the response."""
        service = self._service
        request = parse_completion(await read_json_object(http, service.settings.max_body_bytes))
        check_model(service.settings, request.model)
        service.door.check_priority(service.names(http).key, request.priority)
        limits = known_limits(service.dispatcher)
        check_vocabulary(request, limits)
        num_prompts = len(request.prompt)
        num_each = max(request.num_sequences, request.best_of or 1)
        if num_prompts * num_each > service.settings.max_sequences:
            raise ApiError(
                f"At most {service.settings.max_sequences} completions can be asked for at once", param="prompt"
            )
        prompts = await self._tokenize(request, limits)
        runs = self._plan(http, request, prompts, limits)
        answer = CompletionFormat(service, f"cmpl-{service.names(http).unique}", request, runs, prompts.echoed)
        return GenerationResponse(
            service,
            runs,
            extended(answer, request, service.text.tokenizer, runs),
            stream=request.stream,
            include_usage=request.include_usage,
        )

    async def _tokenize(self, request: CompletionRequest, limits: ModelLimits) -> Prompts:
        text = self._service.text
        token_ids: list[list[int]] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                token_ids.append(await text.encode(prompt, add_special_tokens=request.add_special_tokens))
                check_tokenized(token_ids[-1], text.tokenizer.vocab_size, limits, "prompt")
            else:
                check_token_ids(prompt, limits, "prompt")
                token_ids.append(prompt)
            if not token_ids[-1]:
                raise ApiError("Invalid value for 'prompt': it must not be empty", param="prompt")
        whole = token_ids
        room = limits.max_model_len - (DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens)
        token_ids = [request.truncated(ids, room) for ids in whole]
        echoed = []
        if request.echo:
            for prompt, ids, before in zip(request.prompt, token_ids, whole, strict=True):
                if isinstance(prompt, str) and len(ids) == len(before):
                    located = await text.locate_tokens(prompt, add_special_tokens=request.add_special_tokens)
                else:
                    located = await text.decode_prompt(ids, skip_special_tokens=request.skip_special_tokens)
                echoed.append(located)
        return Prompts(token_ids, echoed)

    def _plan(
        self, http: Request, request: CompletionRequest, prompts: Prompts, limits: ModelLimits
    ) -> list[PromptRun]:
        service = self._service
        output = OutputLimits(asked=request.max_tokens, default=DEFAULT_MAX_TOKENS)
        ranked = request.num_sequences > request.n
        if (num_scores := most(request.prompt_logprobs, request.logprobs if request.echo else None)) is not None:
            for ids in prompts.token_ids:
                check_scores(len(ids), num_scores)
        samplings = []
        for ids in prompts.token_ids:
            max_tokens = allowed_output(len(ids), output, limits, "prompt")
            check_beams(request, len(ids), max_tokens, limits)
            check_samples(request, len(ids), max_tokens, limits)
            samplings.append(
                make_sampling(
                    request,
                    service.text.sampling_defaults,
                    max_tokens=max_tokens,
                    logprobs=0 if ranked and request.logprobs is None else request.logprobs,
                    prompt_logprobs=num_scores,
                    seed=make_seed(request.seed),
                )
            )
        requests = make_requests(service.names(http), service.settings, request, prompts.token_ids, samplings)
        service.aliases.remember(service.names(http), requests)
        stop = StopRules(
            request.stop, frozenset(request.stop_token_ids), request.min_tokens, request.include_stop_str_in_output
        )
        runs = []
        for number, each in enumerate(requests):
            offset = len(prompts.echoed[number].text) if request.echo else 0
            first = number * request.num_sequences
            runs.append(PromptRun(each, _choices(service.text, request, each.prompt_ids, stop, first, offset)))
        return runs


def _choices(
    text: TextService, request: CompletionRequest, prompt_ids: list[int], stop: StopRules, first: int, offset: int
) -> list[Choice]:
    return [
        Choice(
            first + sequence,
            text.detokenizer(prompt_ids, skip_special_tokens=request.skip_special_tokens),
            stop,
            text_offset=offset,
        )
        for sequence in range(request.num_sequences)
    ]


class CompletionFormat:
    """Writes text completions."""

    def __init__(
        self,
        service: ApiService,
        answer_id: str,
        request: CompletionRequest,
        runs: list[PromptRun],
        echoed: list[DecodedPrompt],
    ) -> None:
        self._tokenizer = service.text.tokenizer
        self._request = request
        self._head = service.answer_head(answer_id, "text_completion")
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._is_plain = not (request.echo or request.return_token_ids or request.logprobs is not None)
        self._echoed = {id(run): echo for run, echo in zip(runs, echoed, strict=False)}

    def chunk(self, step: Step) -> bytes:
        """One event; none while everything is withheld."""
        piece, choice = step.piece, step.choice
        first = not choice.started
        if not piece.text and piece.finish_reason is None and not (first and self._request.echo):
            return b""
        choice.started = True
        content = self._choice(step.run, choice.index, piece, first=first)
        return self._prefix + orjson.dumps(content) + self._suffix

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """See `AnswerFormat`."""
        if not self._is_plain:
            return None
        return b'%b{"index":%d,"text":' % (self._prefix, index), b",%b}%b" % (NOTHING_ELSE, self._suffix)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event: no choice, but the usage."""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer, with the best choices of each prompt."""
        chosen = self._best(choices)
        contents = [self._choice(each.run, index, each.whole(), first=True) for index, each in enumerate(chosen)]
        return {**self._head, "choices": contents, "usage": usage}

    def _best(self, choices: list[Collected]) -> list[Collected]:
        """Of each prompt's `best_of` sequences the `n` with the highest mean logprob, best first."""
        drawn, kept = self._request.num_sequences, self._request.n
        if drawn == kept:
            return choices
        best = []
        for start in range(0, len(choices), drawn):
            ranked = sorted(choices[start : start + drawn], key=_mean_logprob, reverse=True)
            best += ranked[:kept]
        return best

    def _choice(self, run: PromptRun, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        """`first`: the piece begins the choice, so it carries what belongs to the prompt."""
        echo = self._echoed.get(id(run)) if first else None
        content: dict[str, Any] = {
            "index": index,
            "text": piece.text if echo is None else echo.text + piece.text,
            "logprobs": self._logprobs(run, piece, echo),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **beam_scores(piece),
        }
        if self._request.return_token_ids:
            content["token_ids"] = piece.token_ids
            if first:
                content["prompt_token_ids"] = run.request.prompt_ids
        return content

    def _logprobs(self, run: PromptRun, piece: Piece, echo: DecodedPrompt | None) -> dict[str, Any] | None:
        num_top = self._request.logprobs
        if num_top is None:
            return None
        tokens = _scored_prompt(run, echo) if echo is not None else []
        tokens += [
            ScoredToken(entry.token_id, offset, entry)
            for entry, offset in zip(piece.logprobs, piece.offsets, strict=True)
        ]
        return completion_logprobs(self._tokenizer, tokens, num_top)


def _scored_prompt(run: PromptRun, echo: DecodedPrompt) -> list[ScoredToken]:
    """The prompt's tokens; the first one follows nothing, so it has no logprob."""
    entries = [None, *run.prompt_logprobs]
    return [
        ScoredToken(token_id, offset, entry)
        for token_id, offset, entry in zip(run.request.prompt_ids, echo.offsets, entries, strict=False)
    ]


def _mean_logprob(collected: Collected) -> float:
    return collected.choice.logprob_sum / max(1, collected.choice.num_tokens)
