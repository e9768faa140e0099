"""Validates a JSON object as a request model, and converts errors to OpenAI's form.

Fields that the models lack are of three kinds: of OpenAI's and other servers' APIs, not supported here, that would
change the answer: a request with such a field is refused, unless its value is listed here as harmless; of chat
completions that other APIs lack (`EXTENSIONS`); and others, which are ignored, as in other servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from kvrelay.excerpts import MAX_VALUE_CHARS, shortened
from kvrelay.text.request.api_error import ApiError, wrong


class RequestModel(BaseModel):
    """Base of all request bodies: types are strict ("1" and true are no integers), unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


Model = TypeVar("Model", bound=RequestModel)


def parse(model: type[Model], content: dict[str, Any]) -> Model:
    """Returns the validated request. Raises ApiError with the name of the first invalid parameter."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False)
    if whole := _whole_numbers(details):
        return parse(model, {**content, **whole})
    raise _as_api_error(details[0])


def _whole_numbers(details: list[ErrorDetails]) -> dict[str, int]:
    """Returns integer parameters that were written like 5.0, as some libraries do (Gson's maps)."""
    return {
        str(detail["loc"][0]): int(detail["input"])
        for detail in details
        if len(detail["loc"]) == 1 and _is_whole(detail) and abs(detail["input"]) < 2**63
    }


def _is_whole(detail: ErrorDetails) -> bool:
    return detail["type"] == "int_type" and isinstance(detail["input"], float) and detail["input"].is_integer()


def _as_api_error(detail: ErrorDetails) -> ApiError:
    kind = detail["type"]
    param = _param_name(detail["loc"])
    if kind == "missing":
        return ApiError(f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    reason = "Input should be an integer of 64 bits" if _is_whole(detail) else detail["msg"]
    return wrong(param, reason, code)


TOKEN_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "format": "token-id"}
NaturalNumbers = Annotated[list[Annotated[int, Field(ge=0), WithJsonSchema(TOKEN_SCHEMA)]], FailFast()]
"""Token ids, of any number."""


@dataclass(frozen=True, slots=True)
class OrDefault:
    """Null selects the default, as in OpenAI's API."""

    default: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(
            lambda value: self.default if value is None else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_null(handler(schema))


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of what the schema allows, and null."""
    return {"anyOf": [schema, {"type": "null"}]}


Flag = Annotated[bool, OrDefault(False)]
FlagOn = Annotated[bool, OrDefault(True)]


def _param_name(location: tuple[int | str, ...]) -> str:
    """Converts ("messages", 0, "role") to "messages[0].role". A part may be a key of the client's."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else ("." if name else "") + shortened(part, MAX_VALUE_CHARS)
    return name


def invalid(message: str) -> PydanticCustomError:
    """An error for validators to raise. The client gets the message unchanged."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def wrong_type(message: str) -> PydanticCustomError:
    """An error for validators to raise if a value has the wrong JSON type."""
    return PydanticCustomError("wrong_type", "{message}", {"message": message})


def object_schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The JSON schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


NOTHING: tuple[Any, ...] = (None, False, [], {}, "")

COMMON: dict[str, tuple[Any, ...]] = {
    "grammar": NOTHING,  # of llama.cpp's server
    "stop_regex": NOTHING,
    # Other sampling methods, and the values that switch them off.
    "typical_p": (None, 1),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "dynatemp_range": (None, 0),
    "repeat_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "n_predict": (None, -1),
    # Sampling methods of text-generation-webui, which many front ends send with every request.
    "top_n_sigma": (None, -1, 0),
    "top_a": (None, 0),
    "tfs": (None, 1),
    "tfs_z": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "smoothing_factor": (None, 0),
    "dynamic_temperature": (None, False),
    "mirostat_mode": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1),
    "negative_prompt": NOTHING,
    "ban_eos_token": (None, False),
    "custom_token_bans": NOTHING,
    "banned_strings": NOTHING,
    "grammar_string": NOTHING,
    "custom_logit_processor": NOTHING,
    # Fields that change the model, the prompt or the form of the answer.
    "lora_path": NOTHING,
    "return_hidden_states": NOTHING,
    "logits_processors": NOTHING,
    "logit_processors": NOTHING,
    "prompt_embeds": NOTHING,
    "input_ids": NOTHING,
    "input_embeds": NOTHING,
    "session_params": NOTHING,
    "kv_transfer_params": NOTHING,
    "packed_top_logprobs": NOTHING,
    "repetition_detection": NOTHING,
    "return_routed_experts": NOTHING,
    "watermarking": NOTHING,
}

COMPLETION: dict[str, tuple[Any, ...]] = {**COMMON, "thinking_token_budget": (None, -1)}

CHAT: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "functions": NOTHING,
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": NOTHING,
    "web_search_options": (None,),
    "documents": NOTHING,
    "chat_template": NOTHING,
}


def refuse_unsupported(content: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> None:
    """Raises ApiError for the first field with a value that is not harmless."""
    for name, value in content.items():
        if name in table and not _is_harmless(value, table[name]):
            raise ApiError(
                f"The parameter '{name}' with this value is not supported",
                param=name,
                code="unsupported_parameter",
            )


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Compares with each harmless value, and distinguishes false from 0 and true from 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


EXTENSIONS = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "extra_key",
    "frequency_penalty",
    "guided_whitespace_pattern",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "speculation",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
)
"""Requests of APIs that lack these fields may have them, with the same meaning."""


def extension_fields(content: dict[str, Any], further: Sequence[str] = ()) -> dict[str, Any]:
    """Those fields of a body that are set, and `further` ones that only this API lacks."""
    return {name: content[name] for name in (*EXTENSIONS, *further) if content.get(name) is not None}
