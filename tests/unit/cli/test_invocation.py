"""How a user runs kvrelay again."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from kvrelay.flag_parser import own_command


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of an installation that the PATH does not lead to."""
    script = tmp_path / "own" / "bin" / "kvrelay"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return script


def test_the_path_is_relative_to_the_current_directory(script: Path) -> None:
    assert own_command() == "own/bin/kvrelay"
    assert own_command(from_anywhere=True) == shlex.quote(str(script))


def test_the_path_is_absolute_if_the_current_directory_was_deleted(script: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert own_command() == shlex.quote(str(script))
