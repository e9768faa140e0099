"""Validates a JSON object as a request model, and converts errors to OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

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


NaturalNumbers = Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
"""Token ids, of any number."""


def _param_name(location: tuple[int | str, ...]) -> str:
    """Converts ("messages", 0, "role") to "messages[0].role"."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def invalid(message: str) -> PydanticCustomError:
    """An error for validators to raise. The client gets the message unchanged."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def wrong_type(message: str) -> PydanticCustomError:
    """An error for validators to raise if a value has the wrong JSON type."""
    return PydanticCustomError("wrong_type", "{message}", {"message": message})
