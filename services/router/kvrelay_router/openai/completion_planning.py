"""Plans the texts behind one or several prompts."""

from __future__ import annotations

from kvrelay.text.request.api_error import context_length_exceeded, wrong
from kvrelay.text.request.completion_request import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    PromptItem,
    too_many_completions,
)
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
    allowed_output,
    check_token_ids,
    check_tokenized,
)
from kvrelay.text.service import DecodedPrompt, TextService, TextTooLong
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.planning import EndpointFields, Plan, TokenizedPrompt, check_request, plan_generation


async def plan_completion(
    service: ApiService, names: RequestNames, request: CompletionRequest
) -> tuple[Plan, list[DecodedPrompt]]:
    """The plan, and the prompts' texts if the answer begins with them. Raises ApiError for every mistake in the
    request."""
    limits = check_request(service, names, request)
    num_each = max(request.num_sequences, request.best_of or 1)
    if len(request.prompt) * num_each > service.settings.max_sequences:
        raise too_many_completions(service.settings.max_sequences)
    if request.grammar is not None:
        await service.check_grammar(request.grammar, request.grammar_param, request.whitespace_param)
    if request.suffix:
        request = _ended_by_markers(service.text, request, limits)
    fields = _endpoint_fields(request)
    prompts = await _prompts(service.text, request, fields, limits)
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


async def _prompts(
    text: TextService, request: CompletionRequest, fields: EndpointFields, limits: ModelLimits
) -> list[TokenizedPrompt]:
    share, room = LoopShare(), fields.output.prompt_room(limits)
    prompts: list[TokenizedPrompt] = []
    for item in request.prompt:
        token_ids = await _tokenize(text, item, request, fields, limits)
        prompts.append(await _prompt(text, item, token_ids, room, request))
        await share.pause()
    return prompts


async def _tokenize(
    text: TextService, item: PromptItem, request: CompletionRequest, fields: EndpointFields, limits: ModelLimits
) -> list[int]:
    if isinstance(item, str):
        max_tokens = limits.max_model_len if request.truncate_prompt_tokens is None else None
        try:
            if request.suffix and text.fill_in_middle is not None:
                token_ids = await text.encode_around(
                    text.fill_in_middle,
                    item,
                    request.suffix,
                    add_special_tokens=request.add_special_tokens,
                    max_tokens=limits.max_model_len,
                )
            else:
                token_ids = await text.encode(
                    item, add_special_tokens=request.add_special_tokens, max_tokens=max_tokens
                )
        except TextTooLong as error:
            raise context_length_exceeded(str(error), "prompt") from None
        check_tokenized(token_ids, text.tokenizer.vocab_size, limits, "prompt")
    else:
        token_ids = item
        if request.truncate_prompt_tokens is None:
            allowed_output(len(token_ids), fields.output, limits, "prompt")
        check_token_ids(token_ids, limits, "prompt")
    if not token_ids:
        raise wrong("prompt", "it must not be empty")
    return token_ids


async def _prompt(
    text: TextService, item: PromptItem, token_ids: list[int], room: int, request: CompletionRequest
) -> TokenizedPrompt:
    """Truncates the prompt to `truncate_prompt_tokens`, and adds the text to echo."""
    kept = request.truncated(token_ids, room)
    if not request.echo:
        return TokenizedPrompt(kept)
    if isinstance(item, str) and len(kept) == len(token_ids):
        return TokenizedPrompt(kept, await text.locate_tokens(item, add_special_tokens=request.add_special_tokens))
    return TokenizedPrompt(kept, await text.decode_prompt(kept, skip_special_tokens=request.skip_special_tokens))


def _endpoint_fields(request: CompletionRequest) -> EndpointFields:
    # The choices of `best_of` are ranked by their log-probabilities, so these are always computed.
    is_ranked = request.num_sequences > request.n
    echoed = request.logprobs if request.echo else None
    return EndpointFields(
        prompt_param="prompt",
        output=RequestedOutput(asked=request.max_tokens, default=DEFAULT_MAX_TOKENS),
        logprobs=0 if is_ranked and request.logprobs is None else request.logprobs,
        prompt_logprobs=max((each for each in (request.prompt_logprobs, echoed) if each is not None), default=None),
        echo_logprobs=echoed,
        has_echo=request.echo,
        scores_in_choices=True,
    )
