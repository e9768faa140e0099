"""The TOML files that a router's configuration names: settings of API keys, and further fleets."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from kvrelay.config.common import NAME_FORM, NAME_PATTERN
from kvrelay.config.field_values import first_fault

MAX_FLEETS = 64
LEAST_PER_MINUTE = 0.001
"""One request in 17 hours. Redis stores the time of the next request, whose precision limits the rate."""

TableT = TypeVar("TableT", bound=BaseModel)


class OwnKeyLimits(BaseModel):
    """One [[key]] table of key_limits_file. Missing fields use the limits for all keys; a key without `tenant` is a
    tenant of its own. `name`: what the access log and metrics call it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: SecretStr
    name: str | None = Field(default=None, pattern=NAME_PATTERN, json_schema_extra={"form": NAME_FORM})
    requests_per_minute: float | None = Field(default=None, ge=LEAST_PER_MINUTE, le=1e6)
    burst: int = Field(default=10, ge=1, le=1 << 20)
    concurrency: int | None = Field(default=None, ge=1, le=1 << 20)
    least_priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    tenant: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        json_schema_extra={"form": NAME_FORM},
    )
    weight: float = Field(default=1.0, ge=0.001, le=1000)


class FleetEntry(BaseModel):
    """One [[fleet]] table of fleets_file. The fields are those of the router, for this fleet alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1)
    served_model_name: str = Field(min_length=1)
    tool_parser: str = Field(default="auto", min_length=1)
    reasoning_parser: str = Field(default="auto", min_length=1)


def read_fleets(path: Path) -> list[FleetEntry]:
    """Raises ValueError with the file and the fault."""
    fleets = _read_tables(path, "fleet", FleetEntry)
    if not 0 < len(fleets) < MAX_FLEETS:
        raise ValueError(f"{path} must hold 1 to {MAX_FLEETS - 1} [[fleet]] tables and nothing else")
    return fleets


def read_key_limits(path: Path) -> dict[str, OwnKeyLimits]:
    """The tables by key. Raises ValueError with the file and the fault; the message never contains a key."""
    limits: dict[str, OwnKeyLimits] = {}
    for number, own in enumerate(_read_tables(path, "key", OwnKeyLimits), 1):
        if limits.setdefault(own.key.get_secret_value(), own) is not own:
            raise ValueError(f"{path}: [[key]] number {number} has the key of an earlier one")
    return limits


def _read_tables(path: Path, name: str, kind: type[TableT]) -> list[TableT]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    tables = content.get(name, [])
    if set(content) - {name} or not isinstance(tables, list):
        raise ValueError(f"{path} must hold [[{name}]] tables and nothing else")
    found = []
    for number, table in enumerate(tables, 1):
        try:
            found.append(kind.model_validate(table))
        except ValidationError as error:
            raise ValueError(f"{path}: [[{name}]] number {number}: {first_fault(kind, error)}") from None
    return found
