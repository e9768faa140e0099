"""The types of all answers, from which the API's description has its schemas. A test holds them against real answers.

Answers are written as dictionaries, which take a fraction of the time of objects, so nothing here is instantiated.
Fields that may be missing are UNSET.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

# -- errors -----------------------------------------------------------------------------------------------------------


class ErrorObject(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorObject


class MessageErrorObject(Struct):
    type: str
    message: str


class MessageError(Struct, tag_field="type", tag="error"):
    error: MessageErrorObject


# -- completions and chats --------------------------------------------------------------------------------------------


class CachedTokens(Struct):
    cached_tokens: int


class ReasoningTokens(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class PromptScore(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]
"""For each token of a prompt: scores by token ids."""


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptScores | None
    score: float | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    score: float | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptScores | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChoiceScore(Struct):
    index: int
    score: float
    logprob: float
    num_tokens: int
    unconditional_logprob: float | UnsetType = UNSET


class Selection(Struct):
    id: str
    object: Literal["select"]
    created: int
    model: str
    selected: int
    scores: list[ChoiceScore]
    usage: Usage


class ItemScore(Struct):
    index: int
    object: Literal["score"]
    score: float


class Scoring(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage


# -- Anthropic's messages ---------------------------------------------------------------------------------------------


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(Struct):
    input_tokens: int


# -- OpenAI's responses -----------------------------------------------------------------------------------------------


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputReasoning(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    status: str
    content: list[OutputReasoning]


class CallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    namespace: str | UnsetType = UNSET


class ResponseInputDetails(CachedTokens):
    cache_write_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class ResponseSettings(Struct, kw_only=True):
    """What a response repeats of its request."""

    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class ResponseObject(ResponseSettings, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    status: str
    output: list[MessageItem | ReasoningItem | CallItem]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage | None


class ResponseTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# -- everything else --------------------------------------------------------------------------------------------------


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class Models(Struct):
    object: Literal["list"]
    data: list[Model]


class TokenizedText(Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Struct):
    prompt: str


class Health(Struct):
    status: str


class Ready(Health):
    workers: dict[str, int]
    models: dict[str, Any] | UnsetType = UNSET


class Version(Struct):
    version: str


class Requests(Struct):
    requests: list[dict[str, Any]]


class Timelines(Struct):
    timelines: list[dict[str, Any]]
