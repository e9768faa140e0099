"""Plans what a validated request runs: one `PromptRun` a prompt, with its sampling parameters and its choices.

Bounds what its answer may hold before anything is queued (`AnswerShape`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile

import msgspec

from kvrelay.protocol.sampling import Grammar, ReasoningChannels, ReasoningSpan, Sampling
from kvrelay.text.choice import Choice
from kvrelay.text.grammar_check import GrammarCheck
from kvrelay.text.request.api_error import ApiError, context_length_exceeded, wrong
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
    allowed_output,
    check_bad_words,
    check_token_ids,
    check_tokenized,
    check_vocabulary,
    make_sampling,
    stop_rules,
)
from kvrelay.text.service import DecodedPrompt, TextTooLong
from kvrelay_router.access.identity import Caller, RequestNames, check_session, check_timeout
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.api_service import ApiService, ApiSettings, check_model, known_limits
from kvrelay_router.openai.generation import PromptRun


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt as tokens. `echo` is its text if the answer begins with it. `begins_inside`: it has opened the
    reasoning. `reasoning`: of the output, before what is constrained."""

    token_ids: list[int]
    echo: DecodedPrompt | None = None
    begins_inside: bool = False
    reasoning: ReasoningSpan | ReasoningChannels | None = None


class Plan(msgspec.Struct, frozen=True):
    """The runs of a request, in the order of its prompts, whose they are, and the memory that they take."""

    runs: list[PromptRun]
    caller: Caller
    memory_bytes: int


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """The values that chat and text completions take from different fields of their requests."""

    prompt_param: str  # the field with the prompt, for error messages
    output: RequestedOutput
    logprobs: int | None
    prompt_logprobs: int | None
    echo_logprobs: int | None = None  # alternatives of the echoed tokens in the answer
    has_echo: bool = False
    scores_in_choices: bool = False  # each choice has the log-probabilities of its prompt
    grammar: Grammar | None = None  # replaces the request's own
    is_parsed: bool = False  # reasoning or tool calls are looked for in the output


async def check_request(service: ApiService, names: RequestNames, request: GenerationFields) -> ModelLimits:
    """Checks everything that needs no prompt tokens. Returns the model's limits; raises ApiError."""
    check_model(service.settings, request.model)
    service.rate_limiter.check_priority(names.caller.key, request.priority)
    limits = await known_limits(service.dispatcher)
    check_vocabulary(request, limits)
    return limits


Encode = Callable[[int | None], Awaitable[list[int]]]
"""Returns a prompt's tokens. Raises TextTooLong if more than this many show before all is tokenized."""


async def prompt_tokens(
    request: GenerationFields, fields: EndpointFields, limits: ModelLimits, vocab_size: int, prompt: list[int] | Encode
) -> list[int]:
    """Returns a prompt's tokens before it is truncated. Raises ApiError if the model cannot run them."""
    param = fields.prompt_param
    if isinstance(prompt, list):
        token_ids = prompt
        if request.truncate_prompt_tokens is None:
            allowed_output(len(token_ids), fields.output, limits, param)
        check_token_ids(token_ids, limits, param)
    else:
        try:
            token_ids = await prompt(limits.max_model_len if request.truncate_prompt_tokens is None else None)
        except TextTooLong as error:
            raise context_length_exceeded(str(error), param) from None
        check_tokenized(token_ids, vocab_size, limits, param)
    if not token_ids:
        raise wrong(param, "it must not be empty")
    return token_ids


async def plan_generation(
    service: ApiService,
    names: RequestNames,
    request: GenerationFields,
    fields: EndpointFields,
    prompts: Sequence[TokenizedPrompt],
    limits: ModelLimits,
) -> Plan:
    """Raises ApiError if the model cannot run one of the prompts, or if the answer may become too large."""
    share = LoopShare()
    shape = _shape(service, request, fields, prompts, limits)
    samplings: list[Sampling] = []
    bad_words = await service.text.encode_bad_words(request.bad_words)
    check_bad_words(request, bad_words, limits)
    for prompt, max_tokens in zip(prompts, shape.max_tokens, strict=True):
        sampling = make_sampling(
            request,
            service.text.sampling_defaults,
            limits,
            num_prompt_tokens=len(prompt.token_ids),
            max_tokens=max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            bad_words=bad_words,
            grammar=fields.grammar,
            reasoning=prompt.reasoning,
        )
        samplings.append(sampling)
        await share.pause()
    token_ids = [prompt.token_ids for prompt in prompts]
    if fields.scores_in_choices and _only_scores(request, fields, shape.max_tokens):
        samplings = share_scores(token_ids, samplings)
    caller = names.caller.share_of(request.user)
    generates = make_requests(names, caller, service.settings, request, token_ids, samplings)
    generates = with_openings(generates, limits, service.text.grammars)
    service.aliases.remember(names, generates)
    runs = [
        PromptRun(generate, _choices(service, request, fields, prompt, number * request.num_sequences))
        for number, (generate, prompt) in enumerate(zip(generates, prompts, strict=True))
    ]
    return Plan(runs, caller, shape.memory_bytes)


def _only_scores(request: GenerationFields, fields: EndpointFields, max_tokens: Sequence[int]) -> bool:
    """Returns whether the answer is nothing but the log-probabilities of the prompts, in one choice each."""
    is_scored = request.prompt_logprobs is not None and not fields.has_echo
    return is_scored and request.num_sequences == 1 and not any(max_tokens)


def _shape(
    service: ApiService,
    request: GenerationFields,
    fields: EndpointFields,
    prompts: Sequence[TokenizedPrompt],
    limits: ModelLimits,
) -> AnswerShape:
    """Raises 400 if the answer may become too large. An output without a length of its own gets the one that fits."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    max_tokens = [allowed_output(length, fields.output, limits, fields.prompt_param) for length in lengths]
    shape = AnswerShape(request, fields, lengths, max_tokens)
    limit_bytes = service.settings.max_answer_bytes
    if fields.output.asked is None and fields.output.default is None and shape.total_bytes > limit_bytes:
        fitting = max(1, shape.tokens_that_fit(limit_bytes))
        shape = msgspec.structs.replace(shape, max_tokens=[min(each, fitting) for each in max_tokens])
    check_answer(shape, limit_bytes)
    return shape


def _choices(
    service: ApiService, request: GenerationFields, fields: EndpointFields, prompt: TokenizedPrompt, first_index: int
) -> list[Choice]:
    text = service.text
    stop = stop_rules(request, text.sampling_defaults)
    return [
        Choice(
            first_index + sequence,
            text.detokenizer(
                prompt.token_ids,
                skip_special_tokens=request.skip_special_tokens,
                shows_markers=fields.is_parsed,
            ),
            stop,
            text_offset=0 if prompt.echo is None else len(prompt.echo.text),
            keeps_token_ids=request.return_token_ids or request.running_usage,
        )
        for sequence in range(request.num_sequences)
    ]


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
    begins_later = sampling.reasoning is not None
    return not (has_logprobs or begins_later or sampling.limits_tokens or sampling.beams is not None)


def make_requests(
    names: RequestNames,
    caller: Caller,
    settings: ApiSettings,
    fields: GenerationFields,
    prompts: list[list[int]],
    samplings: list[Sampling],
) -> list[GenerateRequest]:
    """Returns one request for each prompt; several are numbered. Raises 400 for an invalid `x-request-timeout`
    or `x-kvrelay-session`."""
    many = len(prompts) > 1
    timeout_s = check_timeout(names.timeout, settings.request_timeout_s)
    session = check_session(names.session)
    return [
        GenerateRequest(
            request_id=f"{names.unique}-{index}" if many else names.unique,
            prompt_ids=prompt_ids,
            sampling=sampling,
            num_sequences=fields.num_samples,
            cache_salt=f"{caller.cache_salt}{fields.salt}",
            session=session or fields.user,
            priority=fields.priority,
            timeout_s=timeout_s,
            trace=names.trace,
            owner=caller.owner,
            tenant=caller.tenant,
            weight=caller.weight,
            text_owner=caller.text_owner,
        )
        for index, (prompt_ids, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def share_scores(prompts: Sequence[list[int]], samplings: list[Sampling]) -> list[Sampling]:
    """Returns sampling parameters with which the first prompt scores all its tokens, and the others only the tokens
    behind the prefix that all prompts have in common. `num_shared` lets workers compute that prefix once.

    `samplings` score the prompts from the same token on, and generate nothing.
    """
    return samplings if len(prompts) == 1 else scored_once(samplings, num_common(prompts))


def scored_once(samplings: Sequence[Sampling], num_common: int) -> list[Sampling]:
    """As `share_scores`, for prompts of which all begin with the same `num_common` tokens, and none is shorter."""
    start = samplings[0].logprob_start_len
    first = max(start, num_common)
    # The logits of the token before the first scored one are needed.
    num_shared = min(num_common, first - 1)
    replace = msgspec.structs.replace
    others = [replace(each, logprob_start_len=first, num_shared=num_shared) for each in samplings[1:]]
    return [replace(samplings[0], num_shared=num_shared), *others]


def num_common(prompts: Sequence[list[int]]) -> int:
    """The number of tokens that all prompts begin with, without the last one of the shortest prompt: each keeps a token
    of its own. O(prompts * length), by comparisons of slices."""
    first = prompts[0]
    common = len(first) - 1
    for prompt in prompts[1:]:
        common = num_equal(first, prompt, min(common, len(prompt) - 1))
    return common


def num_equal(one: list[int], other: list[int], most: int) -> int:
    """The number of tokens with which both begin, at most `most`. Compares slices: a loop over tokens is slower."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


TEXT_BYTES = 4
"""JSON bytes of a token's text, on average."""
ID_BYTES = 8
"""JSON bytes of a token id, at most."""
NULL_BYTES = 5
"""JSON bytes of a token before `logprob_start_len`."""
SCORE_BYTES = 64
"""JSON bytes of a log-probability with its token."""
BEAM_TOKEN_BYTES = 64
"""The beams of a search come from their worker at once, so a token of theirs counts for more."""
PROMPT_TOKEN_BYTES = 48
"""Memory of a token id of a prompt: an integer, its place in a list, and its packed form."""
KEPT_TOKENS = 4096
"""Most outputs are shorter."""
SCORE_MEMORY_BYTES = 160
"""Memory of a log-probability with its token until it is written."""
PACKED_SCORE_BYTES = 16
"""Memory of one as it comes from a worker: those of a prompt come so, once for each of its sequences."""


class AnswerShape(msgspec.Struct, frozen=True):
    """What the answer to a request may hold, by the length of each prompt and of its longest output."""

    request: GenerationFields
    fields: EndpointFields
    prompt_tokens: Sequence[int]
    max_tokens: Sequence[int]

    @property
    def num_scores(self) -> int:
        """Log-probabilities in the answer."""
        return (
            self._num_output_tokens * _entries(self.fields.logprobs)
            + self._num_echoed_tokens * _entries(self.fields.echo_logprobs)
            + self._num_scored_prompt_tokens * self._num_copies * _entries(self.request.prompt_logprobs)
        )

    @property
    def _num_output_tokens(self) -> int:
        return sum(self.max_tokens) * self.request.num_sequences

    @property
    def _num_echoed_tokens(self) -> int:
        """Tokens of the prompts, in each choice of the answer."""
        return sum(self.prompt_tokens) * self.request.n

    @property
    def _num_scored_prompt_tokens(self) -> int:
        start = max(self.request.logprob_start_len or 0, 1)
        return sum(max(0, length + 1 - start) for length in self.prompt_tokens)  # token 0 counts too

    @property
    def _num_copies(self) -> int:
        """Number of copies of a prompt's scores in the answer."""
        return self.request.n if self.fields.scores_in_choices else 1

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole answer if every sequence becomes as long as it may."""
        num_bytes = self._num_output_tokens * (BEAM_TOKEN_BYTES if self.request.use_beam_search else TEXT_BYTES)
        num_bytes += self._num_echoed_tokens * TEXT_BYTES if self.fields.has_echo else 0
        if self.request.return_token_ids:
            num_bytes += (self._num_echoed_tokens + self._num_output_tokens) * ID_BYTES
        if self.request.prompt_logprobs is not None:
            unscored = sum(self.prompt_tokens) - self._num_scored_prompt_tokens
            num_bytes += unscored * self._num_copies * NULL_BYTES
        return num_bytes + self.num_scores * SCORE_BYTES

    @property
    def memory_bytes(self) -> int:
        """What the router holds for the request: its prompts, and the log-probabilities of its answer.

        Those of the output are counted for `KEPT_TOKENS`, and not for a stream, which sends them as they come.
        """
        request, fields = self.request, self.fields
        num_entries = max(_entries(fields.echo_logprobs), _entries(request.prompt_logprobs))
        per_score = max(SCORE_MEMORY_BYTES, request.num_sequences * PACKED_SCORE_BYTES)
        num_bytes = self._num_scored_prompt_tokens * num_entries * per_score
        if not request.stream:
            kept = sum(min(each, KEPT_TOKENS) for each in self.max_tokens)
            num_bytes += kept * request.num_sequences * _entries(fields.logprobs) * SCORE_MEMORY_BYTES
        return sum(self.prompt_tokens) * PROMPT_TOKEN_BYTES + num_bytes

    def tokens_that_fit(self, limit_bytes: int) -> int:
        """How long the outputs may be at most within the limit; 0 or less if the rest of the answer exceeds it."""
        without = msgspec.structs.replace(self, max_tokens=[0] * len(self.max_tokens))
        with_one = msgspec.structs.replace(self, max_tokens=[1] * len(self.max_tokens))
        return (limit_bytes - without.total_bytes) // (with_one.total_bytes - without.total_bytes)


def _entries(num_alternatives: int | None) -> int:
    return 0 if num_alternatives is None else num_alternatives + 1


def check_answer(shape: AnswerShape, limit_bytes: int) -> None:
    """Raises 400 with the numbers if the answer may exceed the limit."""
    if shape.total_bytes <= limit_bytes:
        return
    prompts, choices = len(shape.prompt_tokens), shape.request.num_sequences
    raise ApiError(
        f"The answer may take {shape.total_bytes} bytes, and at most {limit_bytes} are allowed: {prompts} prompts with "
        f"{sum(shape.prompt_tokens)} tokens, {choices} choices each with up to {max(shape.max_tokens)} tokens, and "
        f"{shape.num_scores} log-probabilities. Ask for fewer prompts, choices, tokens or log-probabilities at once",
        param=_param(shape),
        code="answer_too_large",
    )


def _param(shape: AnswerShape) -> str:
    """The parameter that contributes most."""
    if shape.num_scores * SCORE_BYTES * 2 > shape.total_bytes:
        return "prompt_logprobs" if shape.fields.logprobs is None else "logprobs"
    return "n" if shape.request.num_sequences > 1 else "prompt" if len(shape.prompt_tokens) > 1 else "max_tokens"
