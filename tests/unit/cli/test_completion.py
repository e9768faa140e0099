"""`kvrelay completion`: what a shell offers after a part of a line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvrelay.cli.completion import SHELLS, completion, script
from kvrelay.cli.main import COMMANDS


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
    assert offered(bash_script, "si") == {"simulate"}
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
