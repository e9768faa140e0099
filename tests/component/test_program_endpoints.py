"""Programs against servers that die, are no servers at all, or lack what a call needs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrelay_programs import ChoiceScore, Endpoint, Generated, ProgramError, Selected, State, gen, program, select

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "someone"}]}
EVENT = 'data: {"choices": [{"index": 0, "text": "so far", "finish_reason": null}]}\n\n'


def answer(body: str, length: int | None = None, content_type: str = "application/json") -> bytes:
    size = len(body.encode()) if length is None else length
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {size}\r\n\r\n{body}".encode()


@contextmanager
def server(*answers: bytes) -> Iterator[str]:
    """Gives one answer to each connection's request, and closes the connection. Behind the last one nobody listens."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for each in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(each)
        listener.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        thread.join(10)


@program
def one_call(s: State) -> None:
    s += "x" + gen("y", 4)


@program
def one_choice(s: State) -> None:
    s += "x" + select("y", [" a", " b"])


def run_to_its_end(endpoint: Endpoint, *, stream: bool) -> None:
    state = one_call.run(endpoint=endpoint, stream=stream)
    if stream:
        list(state.text_iter())


def closing(answer: bytes) -> bytes:
    return answer.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)


MODELS_ANSWER = closing(answer(json.dumps(MODELS)))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ProgramError, match=rf"gen\('y'\): no answer from http://127.0.0.1:{port}"):
        one_call.run(base_url=f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_dies_in_an_answer(stream: bool) -> None:
    cut = answer(EVENT, 5000, "text/event-stream") if stream else answer('{"choices": [', 5000)
    with server(MODELS_ANSWER, cut) as url:
        endpoint = Endpoint(url)
        with pytest.raises(ProgramError, match=r"gen\('y'\): no answer from"):
            run_to_its_end(endpoint, stream=stream)


def test_a_stream_that_ends_without_its_last_event() -> None:
    with (
        server(MODELS_ANSWER, closing(answer(EVENT, None, "text/event-stream"))) as url,
        pytest.raises(ProgramError, match="broke its answer off"),
    ):
        list(one_call.run(endpoint=Endpoint(url), stream=True).text_iter())


def test_an_error_within_a_stream() -> None:
    failed = EVENT + 'data: {"error": {"message": "a worker was lost", "code": "worker_lost"}}\n\ndata: [DONE]\n\n'
    with (
        server(MODELS_ANSWER, closing(answer(failed, None, "text/event-stream"))) as url,
        pytest.raises(ProgramError, match="a worker was lost"),
    ):
        list(one_call.run(endpoint=Endpoint(url), stream=True).text_iter())


def top(**logprobs: float) -> bytes:
    tokens = {f" {token}": logprob for token, logprob in logprobs.items()}
    choice = {"index": 0, "text": " x", "finish_reason": "length", "logprobs": {"top_logprobs": [tokens]}}
    return closing(answer(json.dumps({"choices": [choice]})))


NO_SCORES = closing(
    answer(json.dumps({"choices": [{"index": index, "text": "", "prompt_logprobs": None} for index in range(3)]}))
)
TOKENS = closing(answer('{"tokens": [1, 2]}'))
NOT_FOUND = closing(answer("{}")).replace(b"200 OK", b"404 Not Found")


@pytest.mark.parametrize("refusal", [[TOKENS, NO_SCORES], [NOT_FOUND]])
def test_select_follows_the_likeliest_tokens_where_prompts_are_not_scored(refusal: list[bytes]) -> None:
    with server(MODELS_ANSWER, *refusal, top(x=-0.1, b=-0.5, a=-1.5), top(a=-0.5)) as url:
        endpoint = Endpoint(url)
        for expected in (" b", " a"):  # the second one does not ask for scores again
            selected = one_choice.run(endpoint=endpoint).value("y")
            assert selected.text == expected
        assert [score.total for score in one_choice_scores(selected)] == [-0.5, float("-inf")]


def one_choice_scores(selected: Generated | Selected) -> tuple[ChoiceScore, ...]:
    assert isinstance(selected, Selected)
    return selected.scores


def test_select_without_scores_or_likely_tokens() -> None:
    no_logprobs = closing(answer('{"choices": [{"index": 0, "text": " a", "logprobs": null}]}'))
    with (
        server(MODELS_ANSWER, NOT_FOUND, no_logprobs) as url,
        pytest.raises(ProgramError, match=r"endpoints.py:\d+: select\('y'\): .* cannot select"),
    ):
        one_choice.run(endpoint=Endpoint(url))
    with (
        server(MODELS_ANSWER, NOT_FOUND, top(x=-0.1)) as url,
        pytest.raises(ProgramError, match="none of the 1 likeliest tokens behind '' begins a choice"),
    ):
        one_choice.run(endpoint=Endpoint(url))


def test_select_with_unconditional_normalization_needs_scores() -> None:
    @program
    def unconditional(s: State) -> None:
        s += "x" + select("y", [" a", " b"], normalization="unconditional")

    with server(MODELS_ANSWER, NOT_FOUND) as url, pytest.raises(ProgramError, match="does not score prompts"):
        unconditional.run(endpoint=Endpoint(url))


def test_no_json_and_no_models() -> None:
    with (
        server(closing(answer("<html>"))) as url,
        pytest.raises(ProgramError, match="answered b'<html>', which is not JSON"),
    ):
        one_call.run(endpoint=Endpoint(url))
    with (
        server(closing(answer('{"data": []}'))) as url,
        pytest.raises(ProgramError, match="serves no model"),
    ):
        one_call.run(endpoint=Endpoint(url))


def test_an_endpoint_has_its_own_address() -> None:
    with pytest.raises(TypeError, match="has its own base_url"):
        one_call.run(endpoint=Endpoint("http://127.0.0.1:1"), base_url="http://127.0.0.1:2")
