"""Validates a JSON object as a request model, and converts errors to OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvrelay_router.http.api_error import ApiError, wrong
from kvrelay_router.loop_share import LoopShare


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


MANY_INTEGERS = 1 << 16
"""Integers that are checked at a time: about 1 ms."""


class CheckedIntegers(list[int]):
    """A list with nothing but integers."""


def _natural_numbers(value: Any, check_each: Callable[[Any], list[int]]) -> list[int]:
    """Of a long list the types have been checked, and the range will be."""
    return value if isinstance(value, CheckedIntegers) else check_each(value)


NaturalNumbers = Annotated[list[Annotated[int, Field(ge=0)]], FailFast(), WrapValidator(_natural_numbers)]
"""Token ids of any number, which `check_integers` has checked if they are many."""


async def check_integers(value: Any, param: str) -> Any:
    """Checks a long list that begins with an integer, while other callbacks run; returns other values unchanged.

    Raises ApiError if it has something else than integers.
    """
    if not isinstance(value, list) or len(value) <= MANY_INTEGERS or type(value[0]) is not int:
        return value
    share = LoopShare()
    for start in range(0, len(value), MANY_INTEGERS):
        types = list(map(type, value[start : start + MANY_INTEGERS]))
        if set(types) != {int}:
            param = f"{param}[{start + next(index for index, each in enumerate(types) if each is not int)}]"
            raise wrong(param, "Input should be a valid integer", "invalid_type")
        await share.pause()
    return CheckedIntegers(value)


def value_error(param: str, error: PydanticCustomError) -> ApiError:
    """The error of a validator that was called outside of a model."""
    code = "invalid_type" if error.type.endswith("_type") else "invalid_value"
    return wrong(param, error.message(), code)


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
