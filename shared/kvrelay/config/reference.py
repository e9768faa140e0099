"""The configuration reference, written from the fields: `python -m kvrelay.config.reference` prints it as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from kvrelay.config.common import CommonConfig
from kvrelay.config.loader import ENV_PREFIX, allowed, flag_names, is_list
from kvrelay.config.router import RouterConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.worker import WorkerConfig

WIDTH = 116
"""Columns of a line of text."""

HEAD = """\
# Configuration

<!-- Written by `.venv/bin/python scripts/docs.py` from the fields in shared/kvrelay/config/. Do not edit. -->

Every process reads one frozen configuration at its start, and logs it with its secrets masked. Each value can be set
in four places; a later one of this list wins:

1. the default,
2. a TOML file, named by `--config FILE` or `KVRELAY_CONFIG`,
3. an environment variable `KVRELAY_*` (an empty one counts as unset),
4. a flag.

The file's top level holds for every process that has the field. The tables `[up]`, `[router]`, `[worker]`, `[prefill]`
and `[decode]` hold for that kind of process alone and win over the top level; `[prefill]` and `[decode]` win over
`[worker]`. An unknown name in the file, an unknown flag and a value out of range end the process with status 2 and a
message that names the field, where the value came from, and what is allowed. Unknown `KVRELAY_*` variables are ignored.
A field's heading below is its name in the file.

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

Times are in seconds. Sizes are written as `512MiB` or `4GiB`, or in bytes. Switches take `true` or `false` in the file
and the environment, and `--name` or `--no-name` as a flag. Lists are separated by commas in a variable and a
flag, which may also be repeated, and are arrays in the file.

`KVRELAY_CACHE_DIR` is not a field: it names the directory where the compiled CPU kernel is kept, and the locks by which
processes that share a GPU start one after the other (default: `kvrelay` in `XDG_CACHE_HOME`, or in `~/.cache`).
"""

COMMON = "Router and workers alike: `kvrelay router`, `kvrelay prefill`, `kvrelay decode`."
WORKER = "`kvrelay prefill` and `kvrelay decode`, beside the common fields."
ROUTER = "`kvrelay router`, beside the common fields."
UP = """\
`kvrelay up` starts all services on this machine. It takes the fields below, and passes the flags of the services on to
them; what it decides itself (names, ports, addresses of the services, Redis) it does not take. The services read the
same file and the same environment."""


def render() -> str:
    """The whole document."""
    common = frozenset(CommonConfig.model_fields)
    sections = [
        _section("Common fields", COMMON, CommonConfig),
        _section("Workers", WORKER, WorkerConfig, common),
        _section("Router", ROUTER, RouterConfig, common),
        _section("kvrelay up", UP, UpConfig),
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
        lines += [f"### {name}", "", *_wrapped(_sentence(field)), "", *_facts(name, field), ""]
    return "\n".join(lines)


def _facts(name: str, field: FieldInfo) -> Iterator[str]:
    flags = [] if _has_no_flag(field) else [*flag_names(name), *_aliases(field)]
    if field.annotation is bool:
        flags.append(f"--no-{name.replace('_', '-')}")
    spelled = ", ".join(f"`{flag}`" for flag in flags) or "none, so that it shows in no list of processes"
    yield f"- Flag: {spelled}"
    yield f"- Environment: `{ENV_PREFIX}{name.upper()}`"
    yield f"- Default: {_default(field)}"
    if limits := allowed(field) or _pattern(field):
        yield f"- Allowed: {limits}"


def _has_no_flag(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and "flags" in extra and extra["flags"] is None


def _aliases(field: FieldInfo) -> list[str]:
    extra = field.json_schema_extra
    aliases = extra.get("flags") if isinstance(extra, dict) else None
    return [str(alias) for alias in aliases] if isinstance(aliases, list) else []


def _sentence(field: FieldInfo) -> str:
    text = field.description or ""
    return f"{text[:1].upper()}{text[1:]}."


def _default(field: FieldInfo) -> str:
    """Where the default is made at start, or is a choice of the process, the description says what it is."""
    if field.default_factory is not None or field.default in (None, ()):
        return "see above" if "default:" in (field.description or "") else "not set"
    if isinstance(field.default, bool):
        return "`true`" if field.default else "`false`"
    if isinstance(field.default, ByteSize):
        return f"`{field.default.human_readable()}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _pattern(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not None:
        return ""
    patterns = [rule.pattern for rule in field.metadata if getattr(rule, "pattern", None)]
    return f"text that matches `{patterns[0]}`" if patterns else ""


def _wrapped(text: str) -> Sequence[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


if __name__ == "__main__":
    sys.stdout.write(render())
