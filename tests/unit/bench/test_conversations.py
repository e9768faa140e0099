"""Files of conversations: what is read of each form, and the traces that they become."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_bench import traces
from kvrelay_bench.conversations import (
    DEFAULT_ANSWER_TOKENS,
    Turn,
    holds_conversations,
    read_conversations,
    user_turns,
)
from kvrelay_bench.traces import (
    BadTrace,
    conversation_trace,
    read_trace,
    scaled,
)
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


# -- traces of requests ------------------------------------------------------------------------------------------------


def mooncake(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_traces_are_read_as_they_are_published(tmp_path: Path) -> None:
    entry: dict[str, object] = {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}
    (request,) = read_trace(mooncake(tmp_path / "m.jsonl", entry))
    assert (request.arrival_s, request.num_prompt_tokens, len(request.tokens())) == (0.0, 600, 600)
    assert request.tokens()[0] == 7 * 512 and request.tokens()[599] == 9 * 512 + 87
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert (first.num_prompt_tokens, second.num_output_tokens) == (374, 109)
    assert second.arrival_s == pytest.approx(4.3145790, abs=1e-5)
    assert set(first.hash_ids).isdisjoint(second.hash_ids)
    assert scaled([second], 2.0)[0].arrival_s == pytest.approx(second.arrival_s / 2)


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's time zone, which has summer time."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("new_york")
@pytest.mark.parametrize(
    "times",
    [
        ["2024-05-10 00:00:00.500000+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10 00:00:02.5+00:00"],
        ["2024-05-10 00:00:00.5", "2024-05-10 00:00:01Z", "2024-05-10 02:00:02.5000000+02:00"],
        ["2023-11-05 00:59:59.5", "2023-11-05 01:00:00", "2023-11-05 01:00:01.5"],
        ["2023-03-12 01:59:59.5", "2023-03-12 02:00:00", "2023-03-12 02:00:01.5"],
        ["2023-11-05 01:59:59.5", "2023-11-05 02:00:00", "2023-11-05 02:00:01.5"],
    ],
)
def test_times_of_a_trace_are_those_of_their_zone_and_else_of_utc(times: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{each},3,4" for each in times)]))
    assert [request.arrival_s for request in read_trace(path)] == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no request"),
        ("{}\n", "line 1: it has no"),
        ("no json\n", "line 1"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}\n', "line 1: lengths must be positive"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1"),
        ('{"timestamp": 0, "input_length": Infinity, "output_length": 1}', "line 1"),
        ('{"timestamp": 0, "input_length": 5}', "line 1: it has no 'output_length'"),
        ('{"timestamp": 0, "input": "Hi", "output": "Hi"}', "line 1: it has no 'input_length'"),
        ('[{"timestamp": 0, "input_length": 5, "output_length": 5}]', "it is not a JSON object"),
        ("TIMESTAMP,ContextTokens\n2024-05-10 00:00:00,5", "line 2: it has no 'GeneratedTokens'"),
    ],
)
def test_a_bad_trace_is_named_with_its_line_and_what_it_lacks(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(BadTrace, match=f"bad.*{reason}"):
        read_trace(path)


def test_prompts_of_a_long_trace_never_share_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids whose tokens wrapped around would do that."""
    monkeypatch.setattr(traces, "MAX_HASH_ID", 3)
    path = tmp_path / "a.csv"
    rows = [f"2023-11-16 18:15:{second},{length},1" for second, length in ((46, 1024), (47, 1000), (48, 1))]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    with pytest.raises(BadTrace, match="more than 4 pieces of 512 tokens; take fewer requests"):
        read_trace(path)
    first, second = read_trace(path, 2)
    assert set(first.hash_ids).isdisjoint(second.hash_ids)
