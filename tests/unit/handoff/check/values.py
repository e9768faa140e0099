"""Machines as values: copies that share nothing which either may change, and canonical forms that compare and hash."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec

from kvrelay.protocol.messages import PeerRef

T = TypeVar("T")


def clone(machine: T) -> T:
    """A copy of a machine that shares nothing which either may change."""
    made = object.__new__(type(machine))
    for name, value in vars(machine).items():
        if name != "_frozen":
            made.__dict__[name] = _copied(value)
    return made


def _copied(value: Any) -> Any:
    if isinstance(value, list | set | dict):
        if isinstance(value, dict) and value:
            first = next(iter(value.values()))
            if is_dataclass(first) or isinstance(first, list | set | dict):
                return {key: _copied(item) for key, item in value.items()}
        return value.copy()
    if is_dataclass(value) and not isinstance(value, type) and not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        made = copy(value)
        for part in fields(value):
            setattr(made, part.name, _copied(getattr(made, part.name)))
        return made
    return value


def freeze(value: Any) -> Hashable:
    """A machine's state as a value. Kept with the machine, which is not changed after the step that made it."""
    if value is None or isinstance(value, str | int | float | bytes | Enum | PeerRef):
        return value
    if isinstance(value, list | tuple):
        return tuple([freeze(item) for item in value])
    if isinstance(value, dict):
        return tuple(sorted(((freeze(k), freeze(v)) for k, v in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return frozenset(freeze(item) for item in value)
    if isinstance(value, msgspec.Struct):
        return tuple(freeze(item) for item in msgspec.structs.astuple(value))
    if is_dataclass(value):
        return tuple(freeze(getattr(value, part.name)) for part in fields(value))
    if callable(value):
        return None
    frozen: Hashable = value.__dict__.get("_frozen")
    if frozen is None:
        frozen = value.__dict__["_frozen"] = tuple(
            freeze(item) for name, item in vars(value).items() if name not in ("spec", "_has_ended", "_can_be_seen")
        )
    return frozen
