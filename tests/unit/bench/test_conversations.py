"""Files of conversations: what is read of each form, and the traces that they become."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_bench.conversations import (
    DEFAULT_ANSWER_TOKENS,
    Turn,
    holds_conversations,
    read_conversations,
    user_turns,
)
from kvrelay_bench.traces import BadTrace, conversation_trace, read_trace
from tests.fakes.command import command

main = command("simulate")

SHAREGPT = {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None},
    ]
}
MT_BENCH = {"question_id": 81, "turns": ["Hi", "Again"]}
ALPACA = {"instruction": "Add", "input": "1, 2", "output": "3"}
PROMPT = {"prompt": "Hi", "completion": "Hello"}


def written(path: Path, entries: list[Any], *, as_lines: bool) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)) if as_lines else json.dumps(entries, indent=1))
    return path


@pytest.mark.parametrize("as_lines", [False, True])
@pytest.mark.parametrize(
    ("entry", "turns"),
    [
        (SHAREGPT, [("user", "Hi"), ("assistant", "Hello")]),
        (OPENAI, [("system", "Be brief."), ("user", "Hi"), ("assistant", "")]),
        (MT_BENCH, [("user", "Hi"), ("assistant", None), ("user", "Again"), ("assistant", None)]),
        (ALPACA, [("user", "Add\n\n1, 2"), ("assistant", "3")]),
        (PROMPT, [("user", "Hi"), ("assistant", "Hello")]),
        ({"question": "Hi"}, [("user", "Hi")]),
    ],
)
def test_each_form_is_read(entry: Any, turns: list[tuple[str, str]], as_lines: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "file", [entry], as_lines=as_lines)
    (found,) = read_conversations(path)
    assert list(found) == [Turn(*each) for each in turns]
    assert holds_conversations(path.read_text())


def test_turns_of_the_user_are_requests_with_what_was_said_before() -> None:
    conversation = [Turn("system", "S"), Turn("user", "one"), Turn("assistant", None), Turn("user", "two")]
    first, second = user_turns(conversation)
    assert [turn.text for turn in first.history] == ["S", "one"] and first.has_history
    assert not second.has_history and second.answer is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no conversation"),
        ('{"prompt": "x"}\n{"text": "x"}', "line 2: it has none of conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1: it is no conversation: KeyError: 'value'"),
        ('{"prompt": 5}', "line 1: it is no conversation: TypeError: int in place of a text"),
        ('{"prompt": "x"}\nno', "line 2: "),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "contains no conversation"),
    ],
)
def test_what_is_no_conversation_is_named(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadTrace, match=reason) as raised:
        read_conversations(path, "--prompts")
    assert f"--prompts {path}" in str(raised.value)


TEXTS = st.text(st.sampled_from("ab "), max_size=5000)


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 9))
def test_a_turn_s_prompt_begins_the_next_one_s(texts: list[list[str]], seed: int) -> None:
    """Tokens of the trace are equal where the texts are, in whole conversations and pieces."""
    conversations = [
        [Turn("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(each)] for each in texts
    ]
    trace = conversation_trace(conversations, rate=2.0, seed=seed)
    assert len(trace) == sum(len(list(user_turns(each))) for each in conversations)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
    of_session: dict[str, list[Any]] = {}
    for request in trace:
        of_session.setdefault(request.session, []).append(request)
    for requests in of_session.values():
        for before, after in pairwise(requests):
            shared = before.num_prompt_tokens
            assert after.num_prompt_tokens >= shared
            assert (after.tokens()[:shared] == before.tokens()).all()


def test_a_file_becomes_a_trace_with_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"conversations": [{"from": "human", "value": "a" * 4000}, {"from": "gpt", "value": "b" * 400}] * 2}
    path = written(tmp_path / "share.json", [long, MT_BENCH, *[SHAREGPT] * 20], as_lines=False)
    trace = read_trace(path, rate=4.0)
    assert len(trace) == 24
    lengths = [(each.num_prompt_tokens, each.num_output_tokens) for each in trace if each.session == "conversation-0"]
    assert lengths == [(1000, 100), (2100, 100)]
    answers = [each.num_output_tokens for each in trace if each.session == "conversation-1"]
    assert answers == [DEFAULT_ANSWER_TOKENS] * 2
    assert len(read_trace(path, 3)) == 3
    assert main(["--trace", str(path), "--rate", "4", "--prefill", "1", "--decode", "1"]) == 0
    assert "of best" in capsys.readouterr().out
