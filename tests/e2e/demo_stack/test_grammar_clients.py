"""Libraries that send grammars to vLLM and SGLang, unmodified: outlines and guidance, whose programs assert that what
the demo model answers fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clients.installed import MISSING, PROGRAMS, PYTHON, run_alone
from tests.fakes.stack import Stack


@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
@pytest.mark.parametrize("program", ["outlines_grammars.py", "guidance_grammars.py"])
def test_answers_fit_what_the_library_asks_for(demo_stack: Stack, tmp_path: Path, program: str) -> None:
    command: list[str | Path] = [PYTHON, PROGRAMS / program, demo_stack.base_url, demo_stack.model]
    assert run_alone(command, tmp_path).splitlines() == ["done"]
    demo_stack.wait_until_clean()
