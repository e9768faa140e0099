"""Blocks become messages, and what cannot stand somewhere is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay_programs import (
    ProgramError,
    State,
    assistant,
    gen,
    image,
    program,
    select,
    system,
    user,
)
from tests.fakes.program_endpoint import FakeEndpoint


def chat_messages(**expressions: Any) -> list[dict[str, Any]]:
    @program
    def chat(s: State) -> None:
        for expression in expressions.values():
            s += expression

    return chat.run(endpoint=FakeEndpoint()).messages()


def test_blocks_become_messages() -> None:
    messages = chat_messages(
        system=system("Be kind."), user=user("Who?"), assistant=assistant("I am" + select("who", [" he", " she"]) + ".")
    )
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"] in ("I am he.", "I am she.")
    [_, with_image] = chat_messages(system=system("x"), user=user("See" + image("https://x.example/a.png")))
    assert with_image["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}},
    ]


def test_blocks_as_contexts() -> None:
    @program
    def chat(s: State) -> None:
        with s.user():
            s += "Who"
            s += "?"
        with s.assistant():
            s += gen("answer", 4)

    messages = chat.run(endpoint=FakeEndpoint()).messages()
    assert messages[0] == {"role": "user", "content": "Who?"} and len(messages) == 2


@pytest.mark.parametrize(
    ("appended", "reason"),
    [
        ([gen("x", 4)], "behind no text at all"),
        (["a", user("b")], "a block of the user behind plain text"),
        ([user("a"), "b"], "text outside of a block"),
        ([user("a"), gen("x", 4)], "outside of a block of the assistant"),
        ([user("a" + gen("x", 4))], "outside of a block of the assistant"),
        ([assistant(gen("x", 4))], "in the first message"),
        (["a" + image("https://x.example/a.png")], "outside of a block of the user"),
    ],
)
def test_what_cannot_stand_somewhere_is_refused(appended: list[Any], reason: str) -> None:
    @program
    def wrong(s: State) -> None:
        for each in appended:
            s += each

    endpoint = FakeEndpoint()
    with pytest.raises(ProgramError, match=reason) as caught:
        wrong.run(endpoint=endpoint)
    assert "test_blocks.py:" in str(caught.value) and not endpoint.calls


@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        (lambda: gen(""), ValueError, "a name must be"),
        (lambda: gen("x", regex="a", choices=["b"]), ValueError, "one constraint, not regex and choices"),
        (lambda: gen("x", choices=[]), ValueError, "at least one text"),
        (lambda: gen("x", dtype=dict), ValueError, "dtype must be"),
        (lambda: gen("x", json_schema="{"), ValueError, "not JSON"),
        (lambda: select("x", []), ValueError, "at least one text"),
        (lambda: select("x", "abc"), ValueError, "a list"),
        (lambda: select("x", ["a", ""]), ValueError, "not empty"),
        (lambda: select("x", ["a", "a"]), ValueError, "twice"),
        (lambda: select("x", ["New", "b", "New York"]), ValueError, "'New' begins the choice 'New York'"),
        (lambda: user(user("x")), ValueError, "cannot contain another block"),
        (lambda: user(3), TypeError, "not int"),  # type: ignore[arg-type]
    ],
)
def test_bad_expressions_are_refused_where_they_are_made(wrong: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        wrong()


def test_a_block_ends_with_the_exception_that_leaves_it() -> None:
    def failing_block(s: State, text: str) -> None:
        with s.user():
            s += text
            raise ZeroDivisionError

    @program
    def leaving(s: State) -> None:
        for text in ("one", "two"):
            with pytest.raises(ZeroDivisionError):
                failing_block(s, text)
        s += assistant(gen("word", 4))

    state = leaving.run(endpoint=FakeEndpoint())
    assert [message["role"] for message in state.messages()] == ["user", "user", "assistant"]


def test_a_traced_block_ends_with_the_exception_that_leaves_it() -> None:
    @program
    def leaving(s: State) -> None:
        try:
            with s.user():
                s += "one"
                raise ZeroDivisionError
        except ZeroDivisionError:
            s += system("two")
        s += assistant(gen("word", 4))

    assert leaving.trace().prefix.whole_text.startswith("one\n\ntwo")
