"""The `kvrelay` command."""

from __future__ import annotations

import os
import sys
from importlib import metadata

import pytest

from kvrelay.cli.main import COMMANDS, Command, main


@pytest.mark.parametrize("name", ["version", "--version"])
def test_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    assert capsys.readouterr().out == f"kvrelay {metadata.version('kvrelay')}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage: kvrelay COMMAND"),
        (["decod"], "kvrelay: unknown command 'decod'; did you mean decode? (kvrelay --help lists the commands)\n"),
        (["sideways"], "kvrelay: unknown command 'sideways' (kvrelay --help"),
        (["--versoin"], "kvrelay: unknown flag '--versoin'; did you mean --version? (kvrelay --help"),
        (["health", "http://127.0.0.1:1"], "kvrelay health: http://127.0.0.1:1 does not answer (Connection refused)"),
    ],
)
def test_what_cannot_be_run_is_said(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == (1 if "health" in argv else 2)
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("service", ["router", "prefill", "decode"])
def test_a_service_takes_the_process_over_with_its_flags(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def execv(path: str, argv: list[str]) -> None:
        calls.append((path, argv))
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        main([service, "--help", "--port=5"])
    assert calls == [(sys.executable, [sys.executable, "-m", f"kvrelay_{service}", "--help", "--port=5"])]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in (*COMMANDS, "version"))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))
def test_a_misspelled_flag_gets_one_line_from_every_command(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = command.flag_parser()
    assert parser.prog == f"kvrelay {command.name}"
    with pytest.raises(SystemExit) as raised:
        parser.parse(["--hlep"])
    end = "--help-all lists all flags" if command.name == "up" else "--help lists the flags"
    line = f"kvrelay {command.name}: unknown flag --hlep; did you mean --help? (kvrelay {command.name} {end})\n"
    assert (raised.value.code, capsys.readouterr().err) == (2, line)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))
def test_no_help_has_a_default_twice_or_names_no_kind_of_value(command: Command) -> None:
    parser = command.flag_parser()
    for action in parser._actions:
        text = action.help or ""
        assert text.count("default:") <= 1, action.option_strings
        if action.option_strings and action.nargs != 0:
            assert action.metavar or action.choices, action.option_strings
