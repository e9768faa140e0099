"""The body of POST /v1/select."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation, WrapValidator

from kvrelay_router.http.api_error import wrong
from kvrelay_router.openai.schema.chat_request import ChatFields
from kvrelay_router.openai.schema.generation_fields import CacheSalt, FlagOn, or_default
from kvrelay_router.openai.schema.grammar_fields import GenerationFields
from kvrelay_router.openai.schema.parsing import RequestModel, invalid, parse, wrong_type

PASSED_ON = ("cache_salt", "extra_key", "user", "priority")

Normalization = Literal["tokens", "none", "unconditional"]


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise wrong_type("it must be a list of strings")
    if not value or not all(value):
        raise invalid("it must have at least one choice, and none that is empty")
    return value


def _normalization(value: Any, _: Any) -> Any:
    """Replaces pydantic's messages, of which there would be one for each value."""
    if value in ("tokens", "none", "unconditional"):
        return value
    raise invalid("it must be 'tokens', 'none' or 'unconditional'")


class SelectFields(RequestModel):
    """The fields beside the text before the choices."""

    model: str
    choices: Annotated[SkipValidation[list[str]], BeforeValidator(_choices)]
    normalization: Annotated[Normalization, WrapValidator(_normalization)] = "tokens"
    unconditional_prompt: Annotated[str, or_default("Answer:")] = "Answer:"
    cache_salt: CacheSalt = ""
    extra_key: Annotated[str, Field(max_length=1024), or_default("")] = ""
    user: Annotated[str, Field(max_length=1024), or_default("")] = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), or_default(0)] = 0

    @property
    def planned(self) -> GenerationFields:
        """As a request that scores its prompts and generates nothing."""
        given = {name: value for name in PASSED_ON if (value := getattr(self, name))}
        return GenerationFields.model_validate({"model": self.model, "max_tokens": 0, "prompt_logprobs": 0, **given})


class SelectText(SelectFields):
    prompt: Annotated[str, Field(min_length=1)]
    add_special_tokens: FlagOn = True


class SelectChat(SelectFields, ChatFields):
    pass


def parse_select(content: dict[str, Any], max_choices: int) -> SelectText | SelectChat:
    """Validates a request body. Raises ApiError."""
    if "messages" in content and "prompt" in content:
        raise wrong("prompt", "give either 'prompt' or 'messages', not both")
    if content.get("stream"):
        raise wrong("stream", "a selection cannot be streamed", "unsupported_parameter")
    choices = content.get("choices")
    if isinstance(choices, list) and len(choices) > max_choices:
        raise wrong("choices", f"at most {max_choices} can be compared at once")
    return parse(SelectChat, content) if "messages" in content else parse(SelectText, content)
