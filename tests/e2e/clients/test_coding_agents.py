"""Claude Code and Codex do a scripted edit in a scratch repository, with a scripted model behind the real services."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.installed import MISSING, NODE_MODULES, call, run, snippet
from tests.fakes.scripted.system import ScriptedSystem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (NODE_MODULES / "@openai" / "codex").exists(), reason=MISSING),
]
CLAUDE, CODEX = NODE_MODULES / ".bin" / "claude", NODE_MODULES / ".bin" / "codex"
BEFORE = 'def greet():\n    return "hello"\n'
AFTER = BEFORE.replace("greet", "welcome")
TASK = "Rename greet to welcome in app.py."
DONE = "I renamed it."


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A file in a repository that has nothing else."""
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    file = tmp_path / "repository" / "app.py"
    file.write_text(BEFORE, encoding="utf-8")
    return file


@pytest.fixture
def system(app: Path, tmp_path: Path) -> Iterator[ScriptedSystem]:
    edit = call("Edit", file_path=str(app), old_string="def greet():", new_string="def welcome():")
    shell = call("exec_command", cmd=f"sed -i s/greet/welcome/ {app} && echo was edited")
    rules = [
        {"when": ["And now thanks"], "answer": "You are welcome."},
        {"when": ["<tool_response>[^<]*(has been updated|was edited)"], "answer": DONE},
        {"when": ["<tool_response>[^<]*def greet"], "answer": f"Now I edit it.\n{edit}"},
        {"when": [re.escape(TASK), '"name": "Read"'], "answer": f"I read it.\n{call('Read', file_path=str(app))}"},
        {"when": [re.escape(TASK), '"name": "exec_command"'], "answer": f"I edit it.\n{shell}"},
    ]
    with ScriptedSystem(tmp_path / "system", rules) as system:
        yield system


def claude(system: ScriptedSystem, app: Path, prompt: str, *flags: str) -> dict[str, Any]:
    """The result of a session without a terminal."""
    environment = dict(re.findall(r"^export (\w+)=(.*)$", snippet("claude-code", system), re.MULTILINE))
    command: list[str | Path] = [CLAUDE, "-p", prompt, "--output-format", "json", "--allowedTools", "Read,Edit", *flags]
    result: dict[str, Any] = json.loads(run(command, app.parent, environment | {"DISABLE_AUTOUPDATER": "1"}))
    assert not result["is_error"], result
    return result


def test_claude_code_edits_a_file_and_finds_its_prefix_in_the_cache(system: ScriptedSystem, app: Path) -> None:
    first = claude(system, app, TASK)
    assert first["result"] == DONE and first["num_turns"] == 3
    assert app.read_text(encoding="utf-8") == AFTER
    second = claude(system, app, "And now thanks", "--continue")
    assert second["result"] == "You are welcome." and second["num_turns"] == 1
    cached, computed = (second["usage"][f"{kind}input_tokens"] for kind in ("cache_read_", ""))
    assert cached / (cached + computed) >= 0.95
    # Of the first session's requests only the first has to compute its prompt.
    first_prompt = min(record["num_prompt_tokens"] for record in system.requests())
    assert first["usage"]["input_tokens"] < 1.05 * first_prompt


def test_codex_edits_a_file(system: ScriptedSystem, app: Path, tmp_path: Path) -> None:
    home = tmp_path / "codex"
    home.mkdir()
    (home / "config.toml").write_text(snippet("codex", system) + "[analytics]\nenabled = false\n", encoding="utf-8")
    # The test's repository is a scratch one, and Codex's own sandbox does not start in every container.
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    lines = run(
        [CODEX, "exec", *flags, TASK], app.parent, {"CODEX_HOME": str(home), "KVRELAY_API_KEY": "none"}
    ).splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert app.read_text(encoding="utf-8") == AFTER
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["I edit it.", DONE]
    (finished,) = [event for event in events if event["type"] == "turn.completed"]
    assert finished["usage"]["cached_input_tokens"] >= 0.45 * finished["usage"]["input_tokens"]  # of two requests
