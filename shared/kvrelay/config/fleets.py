"""The file with a router's further fleets."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvrelay.config.field_values import first_fault

MAX_FLEETS = 64


class FleetEntry(BaseModel):
    """One [[fleet]] table of fleets_file. The fields are those of the router, for this fleet alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1)
    served_model_name: str = Field(min_length=1)
    tool_parser: str = Field(default="auto", min_length=1)
    reasoning_parser: str = Field(default="auto", min_length=1)


def read_fleets(path: Path) -> list[FleetEntry]:
    """Raises ValueError with the file and the fault."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    tables = content.get("fleet", [])
    if set(content) != {"fleet"} or not isinstance(tables, list) or not 0 < len(tables) < MAX_FLEETS:
        raise ValueError(f"{path} must hold 1 to {MAX_FLEETS - 1} [[fleet]] tables and nothing else")
    fleets = []
    for number, table in enumerate(tables, 1):
        try:
            fleets.append(FleetEntry.model_validate(table))
        except ValidationError as error:
            fault = first_fault(FleetEntry, error)
            raise ValueError(f"{path}: [[fleet]] number {number}: {fault}") from None
    return fleets
