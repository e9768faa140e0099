"""What a field of a configuration takes, in words, and messages for values that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ByteSize, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from kvrelay.flag_parser import closest

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_OWN_WORDS = ("value_error", "assertion_error")
_PARTS = {int: "whole numbers", str: "texts", SecretStr: "texts"}


def choices(annotation: object) -> list[str]:
    """The values of a Literal, also of one that may be None; empty for other types."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            return [str(choice) for choice in get_args(kind)]
    return []


def is_of(field: FieldInfo, kind: type) -> bool:
    """Returns whether values of the field are of this type, or None."""
    return kind is field.annotation or (
        get_origin(field.annotation) is not tuple and kind in get_args(field.annotation)
    )


def size(number: int) -> str:
    """A number of bytes in the largest unit that divides it, as in 64MiB."""
    for name, unit in _UNITS:
        if number >= unit and number % unit == 0:
            return f"{number // unit}{name}"
    return str(number)


def allowed(field: FieldInfo) -> str:
    """The choices, range or form of a field's values, or "" if it has none."""
    if "form" in extra(field):
        return str(extra(field)["form"])
    return ", ".join(choices(field.annotation)) or _range(field)


def _range(field: FieldInfo) -> str:
    low = high = ""
    is_size = is_of(field, ByteSize)
    for rule in field.metadata:
        match rule:
            case Ge(ge):
                low = _limit(ge, is_size)
            case Gt(gt):
                low = f"more than {_limit(gt, is_size)}"
            case Le(le):
                high = _limit(le, is_size)
            case Lt(int(lt)) if is_of(field, int):
                high = _limit(lt - 1, is_size)
    if low and high:
        return f"{low}, at most {high}" if low.startswith("more") else f"{low} to {high}"
    return f"{low} or more" if low else f"at most {high}" if high else ""


def _limit(value: object, is_size: bool) -> str:
    if is_size:
        assert isinstance(value, int)
        return size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def expected(name: str, field: FieldInfo) -> str:
    """What a value must be, as the end of a sentence: "a whole number, 1 to 64"."""
    if own := choices(field.annotation):
        return f"one of {', '.join(own)}" if len(own) > 1 else own[0]
    limits = allowed(field)
    if get_origin(field.annotation) is tuple:
        kind = f"a list of {_PARTS[get_args(field.annotation)[0]]}"
    elif is_of(field, bool):
        kind = "true or false"
    elif is_of(field, ByteSize):
        kind = "a size in bytes or with a unit, as in 512MiB"
    elif is_of(field, int):
        kind = "a whole number"
    elif is_of(field, float):
        kind = "a number of seconds" if name.endswith("_s") else "a number"
    elif is_of(field, Path):
        kind = "a path"
    else:
        kind = limits or _length(field)
        limits = ""
    return f"{kind}, {limits}" if limits else kind


def _length(field: FieldInfo) -> str:
    least = next((rule.min_length for rule in field.metadata if isinstance(rule, MinLen)), 0)
    most = next((rule.max_length for rule in field.metadata if isinstance(rule, MaxLen)), None)
    if most is None:
        return "text that is not empty" if least else "text"
    return f"text of {least} to {most} characters"


def explanations(model_class: type[BaseModel], error: ValidationError) -> Iterator[tuple[str, object, str]]:
    """Yields for each refused value its field, the value and what is wrong. The field is "" for values that do not fit
    together; the value is then None, as it is for a missing one."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":
            continue  # a consequence of another error
        name = str(detail["loc"][0]) if detail["loc"] else ""
        given = None if not name or detail["type"] == "missing" else detail["input"]
        yield name, given, _fault(model_class, name, detail["type"], detail["msg"])


def _fault(model_class: type[BaseModel], name: str, kind: str, message: str) -> str:
    field = model_class.model_fields.get(name)
    if kind == "missing":
        return "is needed"
    if kind == "extra_forbidden" or (name and field is None):
        return f"is not a known field{closest(name, list(model_class.model_fields))}"
    if field is not None and kind not in _OWN_WORDS:
        return f"must be {expected(name, field)}"
    message = message.removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    limits = "" if field is None else allowed(field)
    return f"{message} (allowed: {limits})" if limits else message


def first_fault(model_class: type[BaseModel], error: ValidationError) -> str:
    """The first explanation as one text that does not contain the value, which may be a secret."""
    name, _, fault = next(explanations(model_class, error))
    return sentence(name, fault)


def sentence(subject: str, fault: str) -> str:
    """The fault of a field, whose name may be "": `burst: must be ...`, `burts is not a known field`."""
    if not subject:
        return fault
    return f"{subject} {fault}" if fault.startswith("is ") else f"{subject}: {fault}"


def extra(field: FieldInfo) -> dict[str, Any]:
    """What the field says of its flag: `flags` (other names; None: no flag), `list`, `metavar`, `form`."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
