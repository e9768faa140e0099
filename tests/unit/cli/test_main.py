"""The `kvrelay` command, what a shell offers behind it, and how a user runs it again."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvrelay.cli.completion import SHELLS, completion, script
from kvrelay.cli.main import COMMANDS, Command, main
from kvrelay.flag_parser import own_command


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
    end = "--help-all lists all flags" if command.name in ("up", "size") else "--help lists the flags"
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


# -- `kvrelay completion` --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "kvrelay.bash"
    path.write_text(script("bash"))
    return path


def offered(path: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words after `kvrelay`."""
    line = " ".join(f"'{word}'" for word in ("kvrelay", *words))
    program = f"""
        source {path}
        function=$(complete -p kvrelay | sed -E 's/.* -F ([^ ]+) .*/\\1/')
        COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
        $function kvrelay '{words[-1]}' '{words[-2] if len(words) > 1 else "kvrelay"}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return {each.strip() for each in done.stdout.splitlines() if each.strip()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_offers_commands_flags_and_values(bash_script: Path) -> None:
    assert set(COMMANDS) <= offered(bash_script, "")
    assert offered(bash_script, "sim") == {"simulate"}
    assert offered(bash_script, "up", "--max-num") == {"--max-num-seqs", "--max-num-batched-tokens"}
    assert offered(bash_script, "up", "--kv-cache-dtype", "fp8_e4") == {"fp8_e4m3"}
    assert offered(bash_script, "bench", "--api", "c") == {"chat", "completions"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion([shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and "request-rate" in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        completion(["csh"])
    assert "'csh' must be one of bash, zsh, fish" in capsys.readouterr().err


# -- how a user runs kvrelay again -----------------------------------------------------------------------------------


@pytest.fixture
def own_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of an installation that the PATH does not lead to."""
    own_script = tmp_path / "own" / "bin" / "kvrelay"
    own_script.parent.mkdir(parents=True)
    own_script.touch()
    monkeypatch.setattr(sys, "executable", str(own_script.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return own_script


def test_the_path_is_relative_to_the_current_directory(own_script: Path) -> None:
    assert own_command() == "own/bin/kvrelay"
    assert own_command(from_anywhere=True) == shlex.quote(str(own_script))


def test_the_path_is_absolute_if_the_current_directory_was_deleted(own_script: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert own_command() == shlex.quote(str(own_script))
