"""Values of messages, derived from the limits that their fields declare."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from kvrelay.protocol.messages import (
    AnyBody,
    Granted,
    Handoff,
    HistogramReport,
    Prompt,
)
from kvrelay.protocol.packed_logprobs import PackedLogprobs
from kvrelay.protocol.sampling import BeamSpec
from tests.fakes.traffic import places

KINDS: tuple[type[msgspec.Struct], ...] = get_args(AnyBody)
MAX_ITEMS = 6
Fields = dict[str, Any]


def _mend_prompt(fields: Fields) -> Fields:
    tokens = fields["tokens"][: len(fields["tokens"]) // 4 * 4]
    return fields | {"tokens": tokens, "num_output": fields["num_output"] % (len(tokens) // 4 + 1)}


def _mend_handoff(fields: Fields) -> Fields:
    ids = fields["candidate_ids"]
    mended = {
        "token_id": None if ids else fields["token_id"] or 0,
        "candidate_logprobs": [0.0] * len(ids),
        "cached_tokens": min(fields["cached_tokens"], fields["num_tokens"]),
    }
    return fields | mended


def _mend_logprobs(fields: Fields) -> Fields:
    num_top = fields["num_top"] % 3
    num_tokens = max(1, min(len(fields["token_ids"]) // 4, MAX_ITEMS))
    sizes = {"token_ids": 4, "logprobs": 8, "top_ids": 4 * num_top, "top_logprobs": 8 * num_top}
    # Zero bytes stand for the drawn ones, many of which are negative ids and NaN.
    return {"num_top": num_top, **{name: bytes(size * num_tokens) for name, size in sizes.items()}}


def _mend_histogram(fields: Fields) -> Fields:
    return fields | {"counts": [0] * (len(fields["bounds"]) + 1)}


MENDED: dict[type[msgspec.Struct], Callable[[Fields], Fields]] = {
    Prompt: _mend_prompt,
    Granted: lambda fields: fields | {"slots": list(dict.fromkeys(fields["slots"]))},
    Handoff: _mend_handoff,
    PackedLogprobs: _mend_logprobs,
    HistogramReport: _mend_histogram,
    BeamSpec: lambda fields: fields | {"num_returned": min(fields["num_returned"], fields["width"])},
}
"""Structs with rules between their fields: makes fields that each keep to their limits keep to the rules too."""


def values(hint: object) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have, or instances of a struct. Raises NotImplementedError for a type or a
    limit that it does not know."""
    return _values(inspect.type_info(hint))


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType(gt=None, ge=least, lt=None, le=most, multiple_of=None):
            return st.integers(-(2**63) if least is None else least, 2**63 - 1 if most is None else most)
        case inspect.FloatType(gt=above, ge=least, lt=None, le=most, multiple_of=None):
            least = above if least is None else least
            return st.floats(least, most, allow_nan=False, exclude_min=above is not None)
        case inspect.StrType(min_length=None, max_length=most, pattern=None):
            return st.text(max_size=_size(most))
        case inspect.StrType(min_length=None, max_length=most, pattern=str() as pattern):
            return st.from_regex(pattern).filter(lambda text: most is None or len(text) <= most)
        case inspect.BytesType(min_length=None, max_length=most):
            return st.binary(max_size=_size(most, 40))
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.LiteralType(values=literals):
            return st.sampled_from(literals)
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            return st.lists(_values(item), min_size=least or 0, max_size=_size(most))
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return st.lists(_values(item), min_size=least or 0, max_size=_size(most)).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(_values, items))
        case inspect.DictType(key_type=key, value_type=value, min_length=None, max_length=most):
            return st.dictionaries(_values(key), _values(value), max_size=_size(most))
        case inspect.UnionType(types=types):
            return st.one_of([_values(each) for each in types])
        case inspect.StructType(cls=cls):
            return _instances(cls)
    raise NotImplementedError(info)


def _size(most: int | None, at_most: int = MAX_ITEMS) -> int:
    return at_most if most is None else min(most, at_most)


@cache
def _instances(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    fields = st.fixed_dictionaries({field.name: _values(field.type) for field in info.fields})
    return fields.map(partial(_made, struct))


def _made(struct: type[msgspec.Struct], drawn: Fields) -> msgspec.Struct:
    mend = MENDED.get(struct)
    return struct(**(drawn if mend is None else mend(drawn)))


# -- hostile ----------------------------------------------------------------------------------------------------------

HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, -1, 0, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), "", b"", [], {}, "x" * 2000]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324]),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(string.printable, max_size=8),
    st.lists(st.integers(-2, 5), max_size=4),
)
"""Values of any type, for fields of any other."""


@st.composite
def hostile_frames(draw: st.DrawFn, body: st.SearchStrategy[Any]) -> bytes:
    """A body's frame with up to three fields, at any depth, replaced, removed or doubled."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(draw(body)), strict=False)
    for _ in range(draw(st.integers(1, 3))):
        found = [(container, key) for container, key in places(tree) if key != "kind"]
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        match draw(st.sampled_from(["replace", "replace", "remove", "double"])):
            case "replace":
                container[key] = draw(HOSTILE)
            case "remove":
                del container[key]
            case "double" if isinstance(container, list):
                container.append(container[key])
            case _ if isinstance(container[key], (str, bytes, list)):
                container[key] = container[key] * 2
    return msgspec.msgpack.encode(tree)


# -- limits -----------------------------------------------------------------------------------------------------------


def structs_of(*roots: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """These structs and all that are nested in them."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(info: Any) -> None:
        if isinstance(info, inspect.StructType):
            if info.cls in found:
                return
            found[info.cls] = None
            for field in info.fields:
                visit(field.type)
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(info, name):
                visit(getattr(info, name))
        for each in (*getattr(info, "types", ()), *getattr(info, "item_types", ())):
            visit(each)

    for root in roots:
        visit(inspect.type_info(root))
    return list(found)
