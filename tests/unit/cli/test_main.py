"""The `kvrelay` command."""

from __future__ import annotations

import os
import sys
from importlib import metadata

import pytest

from kvrelay.cli.main import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"kvrelay {metadata.version('kvrelay')}\n"


def test_version_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"kvrelay {metadata.version('kvrelay')}\n"


def test_a_misspelled_command_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["decod"])
    assert raised.value.code == 2
    assert capsys.readouterr().err == (
        "kvrelay: unknown command 'decod'; did you mean decode? (kvrelay --help lists the commands)\n"
    )


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


@pytest.mark.parametrize("argv", [[], ["sideways"]])
def test_anything_else_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert "kvrelay" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ("up", "router", "prefill", "decode", "version"))
