"""Every refused value, whatever its source, gets one line with its name, the value and the allowed values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from kvrelay.cli.launch_plan import parse_up_flags
from kvrelay.cli.main import COMMANDS
from kvrelay.config.field_values import allowed, choices, is_of
from kvrelay.config.loader import TABLES, ConfigError, flag_name, load_config, resolve
from kvrelay.config.up_config import UpConfig
from kvrelay.flag_parser import FlagParser, result_file
from kvrelay_bench.program_bench import programs_parser
from kvrelay_embedded.engine import SETTINGS, engine_config

KINDS = ("up", "prefill", "decode", "router", "rank")
NEEDED = {"rank": {"engine": "h:1", "rank": "1"}}
SECRETS = ("api_keys", "admin_api_keys")
FOREIGN = re.compile(r"[Ii]nput |should |[Ii]nvalid |valid |[Uu]nable|could not|argument |expected ")
"""Words of pydantic and argparse."""


def fields(kind: str) -> Iterator[tuple[str, FieldInfo]]:
    return ((name, field) for name, field in TABLES[kind].model_fields.items() if name != "role")


def wrong_texts(field: FieldInfo) -> Iterator[str]:
    """Texts that the field refuses; none if it is a name or a path, which may be anything."""
    if get_origin(field.annotation) is tuple:
        if get_args(field.annotation)[0] is int:
            yield "1,wrong"
        return
    if choices(field.annotation) or is_of(field, bool) or any(getattr(rule, "pattern", 0) for rule in field.metadata):
        yield "wr*ng"
    if any(is_of(field, kind) for kind in (int, float, ByteSize)):
        yield from ("wrong", "-99999999999", "nan", "5 s")
    if is_of(field, int):
        yield "1.5"


def refusal(kind: str, name: str, flags: dict[str, Any], environ: dict[str, str]) -> str:
    fixed = {"role": kind} if kind in ("prefill", "decode") else {}
    needed = {each: value for each, value in NEEDED.get(kind, {}).items() if each != name}
    with pytest.raises(ConfigError) as raised:
        resolve(TABLES[kind], {**needed, **flags}, environ, **fixed)
    return str(raised.value)


def check(message: str, source: str, given: object, field: FieldInfo) -> None:
    value = "" if given is None else f" = {given!r}"
    assert message.startswith(f"{source}{value}: must be "), message
    assert not FOREIGN.search(message) and "\n" not in message and ";" not in message, message
    if (limits := allowed(field)) and get_origin(field.annotation) is not tuple:
        assert limits in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_or_variable_says_what_it_must_be(kind: str) -> None:
    num_checked = 0
    for name, field in fields(kind):
        for text in wrong_texts(field):
            given = text.rpartition(",")[2]  # the wrong element of a list
            if field.annotation is not bool:  # the parser gives switches their values
                check(refusal(kind, name, {name: text}, {}), flag_name(name), given, field)
            variable = f"KVRELAY_{name.upper()}"
            check(refusal(kind, name, {}, {variable: text}), variable, given, field)
            num_checked += 1
    assert num_checked > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_the_file_says_what_it_must_be(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.toml"
    for name, field in fields(kind):
        is_list = get_origin(field.annotation) is tuple
        path.write_text(f"[{kind}]\n{name} = {{ a = 1 }}\n")
        given = None if name in SECRETS else {"a": 1}
        message = refusal(kind, name, {"config": str(path)}, {})
        check(message, f"{path}: [{kind}] {name}", given, field)
        assert not is_list or "must be a list of " in message


def test_a_name_of_another_server_is_answered_with_the_flag_s_own() -> None:
    for argv, message in (
        (["--gpu-memory-utilization", "2"], "--memory-utilization = '2': must be a number, more than 0, at most 1"),
        (["--memory-utilization=2"], "--memory-utilization = '2': must be a number"),
        (["--page-size=x"], "--block-size = 'x': must be a whole number, 8 to 128"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(TABLES["decode"], argv, environ={}, role="decode")
    with pytest.raises(ConfigError, match=r"^--redis-url = 'none': kvrelay up needs Redis"):
        resolve(UpConfig, parse_up_flags(["--redis=none"]), {})


# -- flags of commands that have no configuration ----------------------------------------------------------------------


def parsers() -> Iterator[FlagParser]:
    yield from (command.flag_parser() for command in COMMANDS.values())
    yield programs_parser()


@pytest.mark.parametrize("parser", list(parsers()), ids=lambda parser: parser.prog)
def test_a_flag_of_any_command_says_what_it_must_be(parser: FlagParser, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*argv: str) -> str:
        with pytest.raises(SystemExit) as raised:
            parser.parse(argv)
        line = capsys.readouterr().err
        assert raised.value.code == 2 and line.count("\n") == 1, line
        assert line.startswith(f"{parser.prog}: "), line
        assert not FOREIGN.search(line), line
        return line

    for action in parser._actions:
        for flag in action.option_strings:
            if isinstance(action, argparse.BooleanOptionalAction):
                assert f"{flag} takes no value, and 'wrong' was given" in told(f"{flag}=wrong")
            elif action.nargs is None:
                assert f"{flag} needs a value" in told(flag)
                is_text = action.type in (None, Path) or action.metavar == "LIST"
                if action.choices is not None or not is_text:
                    wrong = "/no/wr*ng" if action.type is result_file else "wr*ng"
                    line = told(f"{flag}={wrong}")
                    assert line.startswith(f"{parser.prog}: {flag}: {wrong!r} ") and re.search(
                        "must be |is not JSON", line
                    )


def test_a_file_for_results_is_checked_before_the_run(tmp_path: Path) -> None:
    assert result_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for path, fault in ((tmp_path, "must be a file, and is a directory"), (tmp_path / "no" / "x", "there is no ")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{path}' .*{fault}"):
            result_file(str(path))


# -- the engine in Python -----------------------------------------------------------------------------


def test_settings_of_the_embedded_engine() -> None:
    for name in SETTINGS:
        field = TABLES["decode"].model_fields[name]
        with pytest.raises(ValueError) as raised:
            engine_config("org/model", {name: {"a": 1}})
        check(str(raised.value), name, {"a": 1}, field)
