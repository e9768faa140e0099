"""Builds a config object from a TOML file, `KVRELAY_*` variables and flags, in increasing precedence.

Flags, help and error messages are generated from the fields, so each field is described in one place.

The top level of the file applies to every process that has the field. The tables `[up]`, `[router]`, `[worker]`,
`[prefill]`, `[decode]` and `[rank]` apply to that kind of process and override the top level.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvrelay.config.ranks import RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.worker import WorkerConfig

ENV_PREFIX = "KVRELAY_"
TABLES: dict[str, type[BaseModel]] = {
    "up": UpConfig,
    "worker": WorkerConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "router": RouterConfig,
    "rank": RankConfig,
}

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class ConfigError(ValueError):
    """An invalid value. The message names the field, the source of the value, and the allowed values."""


def load_config(
    config_class: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    environ: Mapping[str, str] | None = None,
    **fixed: Any,
) -> ConfigT:
    """Loads the configuration. `argv` defaults to the command line, `environ` to the environment.

    `fixed` contains values that the process decides itself, such as a worker's role. `--help` and unknown flags exit
    the process, as in argparse; an invalid value raises ConfigError.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add_config_flag(parser)
    add_flags(parser, config_class)
    flags = vars(parser.parse_args(argv))
    return resolve(config_class, flags, os.environ if environ is None else environ, **fixed)


def resolve(config_class: type[ConfigT], flags: Mapping[str, Any], environ: Mapping[str, str], **fixed: Any) -> ConfigT:
    """Like `load_config` for parsed flags: `flags` contains the given ones, and `config` for the file."""
    tables = [name for name, table in TABLES.items() if table is config_class]
    if "role" in fixed:
        tables = ["worker", str(fixed["role"])]
    path = flags.get("config") or environ.get(f"{ENV_PREFIX}CONFIG")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in (
        (f"{path}: {{field}}", _read_file(Path(path), config_class, tables) if path else {}),
        (f"{ENV_PREFIX}{{FIELD}}", _read_environment(config_class, environ)),
        ("{flag}", {name: value for name, value in flags.items() if name in config_class.model_fields}),
    ):
        for name, value in layer.items():
            values[name] = _split(value) if is_list(config_class.model_fields[name]) else value
            sources[name] = source.format(field=name, FIELD=name.upper(), flag=flag_names(name)[0])
    try:
        return config_class(**values, **fixed)
    except ValidationError as error:
        raise ConfigError(_explain(config_class, error, sources)) from None


# -- flags ------------------------------------------------------------------------------------------------------------


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--config FILE`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"TOML file; {ENV_PREFIX}* variables and flags override it [{ENV_PREFIX}CONFIG]",
    )


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    config_class: type[BaseModel],
    skip: frozenset[str] = frozenset(),
) -> None:
    """Adds one flag per field. A flag that is not given sets no attribute."""
    for name, field in config_class.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        aliases = extra.get("flags", [])
        if name in skip or not isinstance(aliases, list):
            continue
        names = [*flag_names(name), *map(str, aliases)]
        help_text = _help(name, field).replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                *names, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, dest=name, help=help_text
            )
        elif is_list(field):
            parser.add_argument(
                *names,
                action="extend",
                type=_split,
                metavar="LIST",
                default=argparse.SUPPRESS,
                dest=name,
                help=help_text,
            )
        else:
            parser.add_argument(*names, metavar=_metavar(field), default=argparse.SUPPRESS, dest=name, help=help_text)


def flag_names(field_name: str) -> list[str]:
    return [f"--{field_name.replace('_', '-')}"]


def is_list(field: FieldInfo) -> bool:
    """Returns whether the field is a list, separated by commas in flags and variables."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("list"))


def allowed(field: FieldInfo) -> str:
    """The choices or range of a field for messages, or "" if it has neither."""
    choices = _choices(field.annotation)
    if choices:
        return ", ".join(choices)
    low = high = ""
    for rule in field.metadata:
        match rule:
            case Ge(ge):
                low = f"{_number(ge)}"
            case Gt(gt):
                low = f"more than {_number(gt)}"
            case Le(le):
                high = f"{_number(le)}"
            case Lt(lt):
                high = f"less than {_number(lt)}"
    if low and high:
        return f"{low} to {high}"
    return f"{low} or more" if low else f"at most {high}" if high else ""


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choices(annotation: object) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return []


def _metavar(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    if choices:
        return "|".join(choices)
    types: tuple[object, ...] = (field.annotation,)
    if get_origin(field.annotation) is not None:
        types = get_args(field.annotation)
    names = {int: "N", float: "X", Path: "FILE"}
    for kind in types:
        if isinstance(kind, type) and kind.__name__ == "ByteSize":
            return "SIZE"
        if isinstance(kind, type) and kind in names:
            return names[kind]
    return "TEXT"


def _help(name: str, field: FieldInfo) -> str:
    text = field.description or ""
    limits = "" if _choices(field.annotation) else allowed(field)
    default = "" if field.default_factory or field.default in (None, ()) else f"default: {_default(field)}"
    notes = "; ".join(note for note in (limits, default) if note)
    return f"{text} ({notes})" if notes else text


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return str(field.default)


# -- sources ----------------------------------------------------------------------------------------------------------


def _read_environment(config_class: type[BaseModel], environ: Mapping[str, str]) -> dict[str, str]:
    names = {f"{ENV_PREFIX}{name.upper()}": name for name in config_class.model_fields}
    return {names[key]: value for key, value in environ.items() if key in names and value != ""}


def _read_file(path: Path, config_class: type[BaseModel], tables: Sequence[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from None
    known = {name for each in TABLES.values() for name in each.model_fields}
    layers: dict[str, dict[str, Any]] = {"": {k: v for k, v in content.items() if k not in TABLES}}
    for table in TABLES:
        section = content.get(table, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {table} must be a table, as in [{table}]")
        layers[table] = section
    for table, section in layers.items():
        fields = known if not table else set(TABLES[table].model_fields)
        for name in section:
            if name not in fields:
                raise ConfigError(f"{path}: {f'[{table}] ' if table else ''}{name} is not a known field")
    merged: dict[str, Any] = {}
    for table in ("", *tables):
        merged |= {name: value for name, value in layers[table].items() if name in config_class.model_fields}
    return merged


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


# -- errors -----------------------------------------------------------------------------------------------------------


def _explain(config_class: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> str:
    return "; ".join(dict.fromkeys(_explanations(config_class, error, sources)))


def _explanations(config_class: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":
            continue  # a consequence of another error
        message = detail["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if not detail["loc"]:
            yield message
            continue
        name = str(detail["loc"][0])
        field = config_class.model_fields.get(name)
        limits = allowed(field) if field is not None else ""
        secret = name in ("api_keys", "admin_api_keys")
        given = "" if secret or detail["type"] == "missing" else f" = {detail['input']!r}"
        yield f"{sources.get(name, flag_names(name)[0])}{given}: {message}" + (
            f" (allowed: {limits})" if limits else ""
        )
