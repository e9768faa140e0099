"""Generates the configuration reference from the fields. `python -m kvrelay.config.reference` prints it as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from textwrap import fill

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from kvrelay.config.common import CommonConfig
from kvrelay.config.field_values import allowed, extra, size
from kvrelay.config.loader import flag_name, is_list
from kvrelay.config.ranks import RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.without_effect import ENV_PREFIX
from kvrelay.config.worker import WorkerConfig

WIDTH = 116
"""Maximum columns of a line of text."""

HEAD = """\
# Configuration

<!-- Written by `.venv/bin/python scripts/docs.py` from the fields in shared/kvrelay/config/. Do not edit. -->

Look up every flag, variable and field. Each process reads its configuration at start and logs it with secrets masked.
A value comes from the last of these places that sets it:

1. the default,
2. a TOML file, named by `--config FILE` or `KVRELAY_CONFIG`,
3. an environment variable `KVRELAY_*` (an empty one counts as unset),
4. a flag.

The top level of the file applies to every process that has the field. The tables `[up]`, `[router]`, `[worker]`,
`[prefill]`, `[decode]` and `[rank]` apply to that kind of process and override the top level; `[prefill]` and
`[decode]` override `[worker]`. Unknown names in the file, unknown flags and invalid values exit the process with status
2 and a message that names the field, the source of the value and the allowed values. Unknown `KVRELAY_*` variables are
reported with the closest known name and have no effect. Headings below are names in the file; the variable of a field
is `KVRELAY_` and its name in capitals.

```toml
# kvrelay.toml: one file for all processes of a fleet
model = "/models/my-decoder"
redis_url = "redis://redis.internal:6379/0"

[worker]
kv_memory_bytes = "8GiB"

[prefill]
token_budget = 2048
max_running = 64

[router]
host = "0.0.0.0"
api_keys_file = "/etc/kvrelay/keys"
```

Times are in seconds. Sizes are written as `512MiB`, `4GiB` or in bytes. Switches are `true` or `false` in the file
and the environment, and `--name` or `--no-name` as flags. Lists are arrays in the file and comma-separated in
variables and flags; such flags may be repeated.

`KVRELAY_CACHE_DIR`, not a field, names the directory of the compiled CPU kernel and of the locks that order the start
of processes on one GPU (default: `kvrelay` in `XDG_CACHE_HOME`, or in `~/.cache`).
"""

COMMON = "Fields of `kvrelay router`, `kvrelay prefill` and `kvrelay decode`."
WORKER = "Further fields of `kvrelay prefill` and `kvrelay decode`."
RANK = """\
`kvrelay rank` runs one rank of a worker, for a machine other than the worker's ([ranks](ranks.md))."""
ROUTER = "Further fields of `kvrelay router`."
UP = """\
`kvrelay up` starts all services on this machine. It takes the fields below and passes flags of the services on to them,
except those it decides itself (names, ports, addresses, Redis). The services read the same file and environment.

`host` and `port` in `[router]` set the endpoint, unless `[up]` has them.
Fields that `kvrelay up` decides itself are refused in the file by name, as is `[rank]`, and reported in the
environment."""


def render() -> str:
    """The complete Markdown document."""
    common = frozenset(CommonConfig.model_fields)
    sections = [
        _section("Common fields", COMMON, CommonConfig),
        _section("Workers", WORKER, WorkerConfig, common),
        _section("Router", ROUTER, RouterConfig, common),
        _section("kvrelay up", UP, UpConfig),
        _section("kvrelay rank", RANK, RankConfig),
    ]
    return "\n".join([HEAD, *sections])


def _section(title: str, text: str, config_class: type[BaseModel], skip: frozenset[str] = frozenset()) -> str:
    fields = {
        name: field
        for name, field in config_class.model_fields.items()
        if name not in skip and not (_has_no_flag(field) and not is_list(field))
    }
    lines = [f"## {title}", "", text, ""]
    for name, field in fields.items():
        lines += [
            f"### {name}",
            "",
            _wrapped(_sentence(field)),
            "",
            *_facts(name, field),
            "",
        ]
    return "\n".join(lines)


def _facts(name: str, field: FieldInfo) -> Iterator[str]:
    flags = [] if _has_no_flag(field) else [flag_name(name), *_aliases(field)]
    if field.annotation is bool:
        flags.append(f"--no-{name.replace('_', '-')}")
    spelled = ", ".join(f"`{flag}`" for flag in flags) or "none, since process lists show flags"
    yield f"- Flag: {spelled}"
    if not flags:
        yield f"- Variable: `{ENV_PREFIX}{name.upper()}`"
    yield f"- Default: {_default(field)}"
    if limits := allowed(field):
        yield f"- Allowed: {limits}"


def _has_no_flag(field: FieldInfo) -> bool:
    return extra(field).get("flags", ()) is None


def _aliases(field: FieldInfo) -> list[str]:
    aliases = extra(field).get("flags")
    return [str(alias) for alias in aliases] if isinstance(aliases, list) else []


def _sentence(field: FieldInfo) -> str:
    text = field.description or ""
    return f"{text[:1].upper()}{text[1:]}."


def _default(field: FieldInfo) -> str:
    """If the default is computed at start, the description states it."""
    if field.is_required():
        return "none: it is required"
    if field.default_factory is not None or field.default in (None, ()):
        return "see above" if "default:" in (field.description or "") else "not set"
    if isinstance(field.default, bool):
        return "`true`" if field.default else "`false`"
    if isinstance(field.default, ByteSize):
        return f"`{size(field.default)}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _wrapped(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(render())
