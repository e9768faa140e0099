"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema

from kvrelay.excerpts import quoted
from kvrelay.protocol.sampling import GrammarKind
from kvrelay.text.chat_template import RESERVED_NAMES, Message
from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.request.parsing import (
    CHAT,
    Flag,
    FlagOn,
    NaturalNumbers,
    OrDefault,
    invalid,
    object_schema,
    or_null,
    parse,
    refuse_unsupported,
    wrong_type,
)
from kvrelay.text.request.sampling_fields import MAX_LOGPROBS
from kvrelay.text.service import ChatOptions
from kvrelay_router.openai.tool_fields import ToolFields, check_tool_results

ROLES = ("system", "developer", "user", "assistant", "tool")

PASSED_ON = ("name", "tool_call_id")
"""Further message fields that templates may read."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with an earlier answer's reasoning, in different servers. Templates read the first two."""

REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning off: of Qwen and GLM, and of DeepSeek."""

TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of text parts; the latter two are those of responses, which clients for both send here as well."""

PROMPT_TOKENS = "prompt_token_ids"
"""The field with the prompt's tokens, in place of messages."""
OF_TEMPLATE = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "reasoning_effort",
    "echo",
)
"""Fields that only a prompt of messages can have."""

MAX_PARTS = 16_384
"""Text parts of a message; tool calls likewise."""
MAX_ARGUMENTS_CHARS = 1 << 20
"""JSON text of a tool call's arguments, which is parsed at once."""
LONG_NUMBER = re.compile(r"[0-9]{19}").search
MAX_MESSAGES = 16_384
"""They are checked at once, in 25 ms at most."""
NO_MESSAGES: list[Any] = []
"""The messages of a request whose prompt is given as token ids."""


def _messages(value: Any) -> list[Message]:
    """Returns messages in the form for templates: contents are strings or lists of text parts."""
    if value is NO_MESSAGES:
        return []
    if not isinstance(value, list):
        raise wrong_type("it must be a list of messages")
    if not value:
        raise invalid("it must not be empty")
    if len(value) > MAX_MESSAGES:
        raise invalid(f"it has {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    return [_message(message, index) for index, message in enumerate(value)]


def _message(value: Any, index: int) -> Message:
    if not isinstance(value, dict):
        raise wrong_type(f"message {index} must be an object")
    role = value.get("role")
    if role not in ROLES:
        raise invalid(f"message {index} has the unknown role {quoted(role)}; known are {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(value, role, index)}
    for name in (*PASSED_ON, *REASONING):
        if value.get(name) is not None:
            if not isinstance(value[name], str):
                raise wrong_type(f"'{name}' of message {index} must be a string")
            message[name] = value[name]
    reasoning = next((message.pop(name) for name in REASONING if name in message), None)
    if reasoning is not None:
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
        message.pop("reasoning", None)
    if (calls := value.get("tool_calls")) is not None and _as_list(calls, index):
        message["tool_calls"] = [_tool_call(call, index) for call in calls]
    return message


def _content(message: dict[str, Any], role: str, index: int) -> str | list[dict[str, str]]:
    """Returns a string or text parts. An assistant's message may have tool calls, a refusal or reasoning instead, or
    nothing: clients send answers back as they got them. A tool may have no result."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not content and isinstance(content, list | None) and role in ("assistant", "tool"):
        refusal = message.get("refusal")
        return refusal if role == "assistant" and isinstance(refusal, str) else ""
    if not isinstance(content, list) or not content:
        raise wrong_type(f"the content of message {index} must be a string or a list of text parts")
    if len(content) > MAX_PARTS:
        raise invalid(f"message {index} has {len(content)} text parts; at most {MAX_PARTS} are allowed")
    return [_text_part(part, role, index) for part in content]


def _text_part(part: Any, role: str, index: int) -> dict[str, str]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong_type(f"the content parts of message {index} must be objects with a type")
    if part["type"] == "refusal" and role == "assistant":
        part = {"type": "text", "text": part.get("refusal")}
    if part["type"] not in TEXT_TYPES:
        raise invalid(f"message {index} has a content part of type {quoted(part['type'])}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise wrong_type(f"a text part of message {index} has no text")
    return {"type": "text", "text": part["text"]}


def _as_list(calls: Any, index: int) -> list[Any]:
    if not isinstance(calls, list):
        raise wrong_type(f"the tool calls of message {index} must be a list")
    if len(calls) > MAX_PARTS:
        raise invalid(f"message {index} has {len(calls)} tool calls; at most {MAX_PARTS} are allowed")
    return calls


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """Clients send the arguments of a call as JSON text, but templates need an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong_type(f"a tool call of message {index} has no function name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise wrong_type(f"the arguments of a tool call of message {index} must be JSON text or an object")
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS_CHARS:
            raise invalid(
                f"the arguments of a tool call of message {index} have {len(arguments)} characters; at most "
                f"{MAX_ARGUMENTS_CHARS} are allowed"
            )
        arguments = arguments_of(arguments)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call that a model has written. Text that is no JSON object is the value of `arguments`, as in
    answers of `/v1/messages`: clients send such a call back with an error as its result."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"arguments": text}
    if LONG_NUMBER(text):
        with suppress(RecursionError):
            value = json.loads(text)  # keeps all digits
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": text}


def string_field(item: dict[str, Any], name: str, where: str) -> str:
    """The string `name` of a part of another API's conversation, which errors call `where`. Raises ApiError."""
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "it must be a string")
    return value


def joined_parts(parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Text parts as the content of a message. Templates read a string most reliably."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 else parts


def _template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("it must be an object")
    if reserved := sorted(RESERVED_NAMES & value.keys()):
        raise invalid(f"'{reserved[0]}' cannot be set here")
    return value


def _budget(value: Any) -> Any:
    """-1 is no limit, as in vLLM."""
    return None if value == -1 and not isinstance(value, bool) else value


_TEXT_OR_NULL = or_null({"type": "string"})
_PART = object_schema({"type": {"enum": list(TEXT_TYPES)}, "text": {"type": "string"}}, "type", "text")
_REFUSAL = object_schema({"type": {"const": "refusal"}, "refusal": {"type": "string"}}, "type", "refusal")
_PARTS: dict[str, Any] = {"type": "array", "items": _PART}
_CALL = object_schema(
    {
        "id": {},
        "type": {},
        "function": object_schema(
            {"name": {"type": "string"}, "arguments": {"anyOf": [*_TEXT_OR_NULL["anyOf"], {"type": "object"}]}}, "name"
        ),
    },
    "function",
)
_FURTHER = dict.fromkeys(PASSED_ON + REASONING, _TEXT_OR_NULL)
_ASKING = {"role": {"enum": ["system", "developer", "user"]}, **_FURTHER}
_ASKING["content"] = {"anyOf": [{"type": "string"}, {**_PARTS, "minItems": 1}]}
_ANSWERING = {"role": {"const": "assistant"}, **_FURTHER, "refusal": {}}
_ANSWERING["content"] = {
    "anyOf": [*or_null({"type": "string"})["anyOf"], {**_PARTS, "items": {"anyOf": [_PART, _REFUSAL]}}]
}
_ANSWERING["tool_calls"] = or_null({"type": "array", "items": _CALL})
_RESULT = {"role": {"const": "tool"}, **_FURTHER, "content": {"anyOf": [*_TEXT_OR_NULL["anyOf"], _PARTS]}}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            object_schema(_ASKING, "role", "content"),
            object_schema(_ANSWERING, "role"),
            object_schema(_RESULT, "role"),
        ]
    },
}
"""What `_messages` takes, apart from the order of calls and results."""


class ChatFields(ToolFields):
    """The fields that determine the prompt. POST /tokenize has them as well."""

    # `_messages` has checked them: pydantic would copy each.
    messages: Annotated[SkipValidation[list[Message]], BeforeValidator(_messages), WithJsonSchema(MESSAGES_SCHEMA)]
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    chat_template_kwargs: Annotated[
        dict[str, Any], BeforeValidator(_template_kwargs), WithJsonSchema(or_null({"type": "object"}))
    ] = Field(default_factory=dict)
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None

    @property
    def options(self) -> ChatOptions:
        """The generation prompt defaults to false if the final message is continued. Raises if both are true."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true",
                param="continue_final_message",
            )
        wanted = self.add_generation_prompt
        return ChatOptions(
            add_generation_prompt=not self.continue_final_message if wanted is None else wanted,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            template_kwargs=self._variables,
            tools=self.shown_tools,
        )

    @property
    def _variables(self) -> dict[str, Any]:
        """The template's variables. `chat_template_kwargs` has precedence over `reasoning_effort`."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        switches = dict.fromkeys(REASONING_SWITCHES, False) if self.reasoning_effort == "none" else {}
        return {"reasoning_effort": self.reasoning_effort, **switches, **self.chat_template_kwargs}


class ChatRequest(ChatFields, GenerationFields):
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), OrDefault(0)] = 0
    prompt_token_ids: Annotated[NaturalNumbers, OrDefault([])] = Field(default_factory=list)
    include_reasoning: FlagOn = True
    separate_reasoning: FlagOn = True
    echo: Flag = False
    thinking_token_budget: Annotated[Annotated[int, Field(ge=0, lt=2**31)] | None, BeforeValidator(_budget)] = None

    @property
    def is_calls_or_format(self) -> bool:
        """The output is calls, or a text that follows the request's grammar. A structural tag, which may describe calls
        itself, is of the whole output."""
        has_format = self.grammar is not None and self.grammar.kind is not GrammarKind.STRUCTURAL_TAG
        return has_format and self.choice.mode == "auto" and bool(self.callable_tools)

    @property
    def joins_reasoning(self) -> bool:
        """True if reasoning and its markers are to be part of the content, as the model writes them."""
        return self.include_reasoning and not self.separate_reasoning

    @property
    def echoed(self) -> str:
        """The text that the answer begins with: that of the last message, if it is the assistant's."""
        if not self.echo or (last := self.messages[-1])["role"] != "assistant":
            return ""
        content = last["content"]
        return content if isinstance(content, str) else "".join([part["text"] for part in content])

    @property
    def wanted_tokens(self) -> int | None:
        """The value of `max_completion_tokens`, else of the older `max_tokens`. None: the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse_chat(content: dict[str, Any]) -> ChatRequest:
    """Validates a request body. Raises ApiError."""
    refuse_unsupported(content, CHAT)
    request = parse(ChatRequest, _without_messages(content) if content.get(PROMPT_TOKENS) else content)
    request.check_tools()
    check_tool_results(request.messages)
    request.check_together(wants_logprobs=request.logprobs, max_tokens=request.wanted_tokens)
    if request.num_sequences > request.n:
        raise wrong("best_of", "without 'use_beam_search' it is not supported here", "unsupported_parameter")
    if request.top_logprobs and not request.logprobs:
        raise wrong("top_logprobs", "it needs 'logprobs' to be true")
    if request.logprob_token_ids:
        token_ids = list(dict.fromkeys(request.logprob_token_ids))
        return request.model_copy(update={"logprob_token_ids": token_ids, "top_logprobs": len(token_ids)})
    return request


def _without_messages(content: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat whose prompt is tokens. Raises ApiError for what belongs to messages."""
    if content.get("messages"):
        raise wrong(PROMPT_TOKENS, "it stands in place of 'messages', which must be empty")
    for name in OF_TEMPLATE:
        if content.get(name):
            raise wrong(name, f"it belongs to 'messages', and '{PROMPT_TOKENS}' stands in their place")
    return {**content, "messages": NO_MESSAGES}


NOT_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "tools": (None, []),
    "use_beam_search": (None, False),
    "n": (None, 1),
    "best_of": (None, 1),
    "prompt_logprobs": (None,),
    PROMPT_TOKENS: (None, []),
}
"""Fields that batches refuse, with the values that change nothing."""

WITH_MESSAGES = ("model", "continue_final_message", "add_generation_prompt")
"""Fields that every conversation is checked with. The others, which may be large, are read once for all."""


def parse_batch(content: dict[str, Any], max_conversations: int) -> list[ChatRequest]:
    """Returns one request for each conversation. Raises ApiError."""
    for name, harmless in NOT_IN_BATCHES.items():
        if content.get(name) not in harmless:
            raise wrong(name, "it is not supported in batches", "unsupported_parameter")
    conversations = content.get("messages")
    if not isinstance(conversations, list) or not all(isinstance(each, list) for each in conversations):
        raise wrong("messages", "it must be a list of conversations, which are lists of messages", "invalid_type")
    if not 0 < len(conversations) <= max_conversations:
        raise wrong("messages", f"a batch has 1 to {max_conversations} conversations")
    requests: list[ChatRequest] = []
    for index, messages in enumerate(conversations):
        shared = {name: content[name] for name in WITH_MESSAGES if name in content} if requests else content
        chat = {**shared, "messages": messages}
        try:
            request = parse_chat(chat)
            requests.append(requests[0].model_copy(update={"messages": request.messages}) if requests else request)
        except ApiError as error:
            if error.param == "messages":
                error.message = f"Conversation {index}: {error.message}"
            raise
    return requests
