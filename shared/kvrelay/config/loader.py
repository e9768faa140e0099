"""Builds a config object from a TOML file, `KVRELAY_*` variables and flags, in increasing precedence.

Flags, help and error messages are generated from the fields, so each field is described in one place.

The top level of the file applies to every process that has the field. The tables `[up]`, `[router]`, `[worker]`,
`[prefill]`, `[decode]` and `[rank]` apply to that kind of process and override the top level. `kvrelay up` also takes
its endpoint from `[router]`, and refuses fields of services that it sets itself.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic.fields import FieldInfo

from kvrelay.config.field_values import allowed, choices, explanations, extra, is_of, sentence, size
from kvrelay.config.ranks import RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.without_effect import (
    ADVICE,
    ENV_PREFIX,
    UP_FIELDS_OF_ROUTER,
    ignored_variables,
    refused_fields,
    unknown_variables,
)
from kvrelay.config.worker import WorkerConfig
from kvrelay.flag_parser import CommandFailed, FlagParser, closest

TABLES: dict[str, type[BaseModel]] = {
    "up": UpConfig,
    "worker": WorkerConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "router": RouterConfig,
    "rank": RankConfig,
}

DESCRIPTIONS = {
    "router": "One router: the HTTP endpoint of a fleet.",
    "prefill": "One prefill worker.",
    "decode": "One decode worker.",
    "rank": "One rank of a worker with --tensor-parallel-size, for a machine other than the worker's.",
}
"""Descriptions of the services, for their help."""

_SECRETS = ("api_keys", "admin_api_keys")

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class ConfigError(CommandFailed):
    """An invalid value. The message names the field, the source of the value, and the allowed values."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=2)


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
    flags = vars(config_parser(config_class, prog, description).parse(argv))
    return resolve(config_class, flags, os.environ if environ is None else environ, **fixed)


def config_parser(
    config_class: type[BaseModel], prog: str | None, description: str | None, usage: str | None = None
) -> FlagParser:
    """The parser of a process that takes all fields of one class."""
    usage = usage or (None if prog is None else f"{prog} [flags]")
    parser = FlagParser(prog, description, usage, advice=ADVICE, with_version=True)
    group = parser.add_argument_group("flags")
    add_config_flag(group)
    add_flags(group, config_class)
    return parser


def resolve(config_class: type[ConfigT], flags: Mapping[str, Any], environ: Mapping[str, str], **fixed: Any) -> ConfigT:
    """Like `load_config` for parsed flags: `flags` contains the given ones, and `config` for the file."""
    path = config_path(flags, environ)
    layers = [] if path is None else _file_layers(path, config_class, fixed.get("role"))
    layers += [
        (f"{ENV_PREFIX}{{FIELD}}", _read_environment(config_class, environ)),
        ("{flag}", {name: value for name, value in flags.items() if name in config_class.model_fields}),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for name, value in layer.items():
            values[name] = _split(value) if is_list(config_class.model_fields[name]) else value
            form = source.replace("{field}", name).replace("{FIELD}", name.upper())
            sources[name] = form.replace("{flag}", flag_name(name))
    try:
        return config_class(**values, **fixed)
    except ValidationError as error:
        raise ConfigError(_explain(config_class, error, sources)) from None


# -- flags ------------------------------------------------------------------------------------------------------------


def add_config_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
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
        aliases = extra(field).get("flags", [])
        if name in skip or not isinstance(aliases, list):
            continue
        names = [flag_name(name), *map(str, aliases)]
        given: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(field).replace("%", "%%")}
        if field.annotation is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **given)
        elif is_list(field):
            parser.add_argument(*names, action="extend", type=_split, metavar="LIST", **given)
        else:
            parser.add_argument(*names, metavar=_metavar(field), **given)


def flag_name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"


def is_list(field: FieldInfo) -> bool:
    """Returns whether the field is a list, separated by commas in flags and variables."""
    return bool(extra(field).get("list"))


def _metavar(field: FieldInfo) -> str:
    if own := choices(field.annotation):
        return "|".join(own)
    if "metavar" in extra(field):
        return str(extra(field)["metavar"])
    types: tuple[object, ...] = (field.annotation,)
    if get_origin(field.annotation) is not None:
        types = get_args(field.annotation)
    names = {int: "N", float: "X", Path: "FILE"}
    for kind in types:
        if kind is ByteSize:
            return "SIZE"
        if isinstance(kind, type) and kind in names:
            return names[kind]
    return "TEXT"


_OWN_DEFAULT = re.compile(r" \((default: .+)\)$")


def _help(field: FieldInfo) -> str:
    """The description with limits and default in one pair of parentheses at its end."""
    text = field.description or ""
    is_described = bool(choices(field.annotation)) or "form" in extra(field)
    limits = "" if is_described else allowed(field)
    default = ""
    if own := _OWN_DEFAULT.search(text):
        text, default = text[: own.start()], own[1]
    elif field.is_required():
        default = "required"
    elif not field.default_factory and field.default not in (None, (), ""):
        default = f"default: {_default(field)}"
    notes = "; ".join(note for note in (limits, default) if note)
    return f"{text} ({notes})" if notes else text


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return size(field.default) if is_of(field, ByteSize) else str(field.default)


# -- sources ----------------------------------------------------------------------------------------------------------


def _read_environment(config_class: type[BaseModel], environ: Mapping[str, str]) -> dict[str, str]:
    names = {f"{ENV_PREFIX}{name.upper()}": name for name in config_class.model_fields}
    return {names[key]: value for key, value in environ.items() if key in names and value != ""}


def config_path(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """The configuration file that a flag or the environment names."""
    path = flags.get("config") or environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(path) if path else None


def check_up_file(path: Path) -> None:
    """Raises ConfigError if the file sets a field that `kvrelay up` sets itself, which would have no effect."""
    if refused := list(refused_fields(_read_file(path))):
        raise ConfigError(f"{path}: {'; '.join(refused)}")


def variable_warnings(environ: Mapping[str, str], *, for_up: bool = False) -> list[str]:
    """Messages for `KVRELAY_*` variables that have no effect."""
    warnings = list(unknown_variables(environ, _all_fields()))
    return [*warnings, *ignored_variables(environ, ENV_PREFIX)] if for_up else warnings


def _all_fields() -> set[str]:
    return {name for each in TABLES.values() for name in each.model_fields}


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of the file by name, the top level as "". Raises ConfigError, also for unknown fields."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from None
    layers: dict[str, dict[str, Any]] = {"": {k: v for k, v in content.items() if k not in TABLES}}
    for table in TABLES:
        section = content.get(table, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {table} must be a table, as in [{table}]")
        layers[table] = section
    for table, section in layers.items():
        fields = set(TABLES[table].model_fields) if table else _all_fields()
        for name in section:
            if name not in fields:
                label = f"[{table}] {name}" if table else name
                raise ConfigError(f"{path}: {label} is not a known field{_place_of(name, fields)}")
    return layers


def _place_of(name: str, fields: Collection[str]) -> str:
    """The tables that have the field, or else a similar name."""
    tables = [f"[{table}]" for table, each in TABLES.items() if name in each.model_fields]
    return f"; it belongs into {' or '.join(tables)}" if tables else closest(name, fields)


def _file_layers(path: Path, config_class: type[BaseModel], role: str | None) -> list[tuple[str, dict[str, Any]]]:
    """The file's values for a process in increasing precedence, each layer with the form of its source in messages."""
    content = _read_file(path)
    if config_class is UpConfig:
        return _up_layers(path, content)
    own = ["worker", role] if role else [name for name, table in TABLES.items() if table is config_class]
    layers = []
    for table in ("", *own):
        values = {name: value for name, value in content[table].items() if name in config_class.model_fields}
        layers.append((f"{path}: {f'[{table}] ' if table else ''}{{field}}", values))
    return layers


def _up_layers(path: Path, content: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """As `_file_layers`: the endpoint of `kvrelay up` is its router's, so fields of `[router]` set it as well."""
    layers: list[tuple[str, dict[str, Any]]] = []
    for table in ("", "router"):
        for name in UP_FIELDS_OF_ROUTER:
            if name in content[table]:
                layers.append((f"{path}: {f'[{table}] ' if table else ''}{name}", {name: content[table][name]}))
    for table in ("", "up"):
        values = {name: value for name, value in content[table].items() if name in UpConfig.model_fields}
        if not table:
            values = {name: value for name, value in values.items() if name not in UP_FIELDS_OF_ROUTER}
        layers.append((f"{path}: {f'[{table}] ' if table else ''}{{field}}", values))
    return layers


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


# -- errors -----------------------------------------------------------------------------------------------------------


def _explain(config_class: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> str:
    return "; ".join(dict.fromkeys(_explanations(config_class, error, sources)))


def _explanations(config_class: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> Iterator[str]:
    for name, value, fault in explanations(config_class, error):
        if not name:
            yield fault
            continue
        given = "" if value is None or name in _SECRETS else f" = {value!r}"
        yield sentence(f"{sources.get(name, flag_name(name))}{given}", fault)
