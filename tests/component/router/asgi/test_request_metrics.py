"""The metrics and the span of a request, as the HTTP layer sees it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import FinishReason
from kvrelay.telemetry.metrics import Instruments
from kvrelay.telemetry.tracer import parse_traceparent
from kvrelay.text.service import TextService
from kvrelay_router.dispatch.interface import RequestFailed
from kvrelay_router.openai.request_metrics import DURATION_S, FIRST_TOKEN_S, PER_TOKEN_S, RequestMetrics
from tests.component.router.rig import MODEL, Router, running_router
from tests.fakes.spans import RecordedSpans
from tests.fakes.waiting import until

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Observed:
    """A router, and what was noted of its requests."""

    def __init__(self) -> None:
        self.spans = RecordedSpans()
        self.instruments = Instruments()
        self.metrics = RequestMetrics(MODEL, self.instruments, self.spans.tracer)
        self.router: Router

    def counts(self, name: str) -> dict[tuple[str, str], int]:
        """Requests by operation and error."""
        found = {}
        for point in self.instruments.samples()[name]:
            labels = dict(point.labels)
            assert labels.pop("gen_ai.provider.name") == "kvrelay"
            assert labels.pop("gen_ai.request.model") == MODEL
            assert not isinstance(point.value, float)
            found[labels["gen_ai.operation.name"], labels.get("error.type", "")] = sum(point.value.counts)
        return found


@pytest_asyncio.fixture
async def observed(text: TextService) -> AsyncIterator[Observed]:
    observed = Observed()
    async with running_router(text, metrics=observed.metrics) as observed.router:
        yield observed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_measured_once(observed: Observed, stream: bool) -> None:
    router = observed.router
    answer = await router.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "otter", "stream": stream, "n": 2},
        headers={"traceparent": TRACE, "x-request-id": "mine"},
    )
    assert answer.status_code == 200
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        assert observed.counts(f"gen_ai.server.{name}") == {("text_completion", ""): 1}
    (span,) = observed.spans.spans
    assert (span.name, span.kind, span.error) == (f"text_completion {MODEL}", "server", None)
    assert span.parent == parse_traceparent(TRACE)
    (request,) = router.dispatcher.requests
    assert request.trace == str(span.context)
    assert span.parent is not None and span.context.trace_id == span.parent.trace_id
    assert span.context.span_id != span.parent.span_id
    assert span.attributes["gen_ai.usage.input_tokens"] == len(request.prompt_ids)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert str(span.attributes["kvrelay.request_id"]).startswith("mine-")


async def test_one_token_has_no_time_between_tokens(observed: Observed) -> None:
    observed.router.answers("An", finish=FinishReason.LENGTH)
    tokens = observed.router.tokens("An")
    await observed.router.post("/v1/completions", prompt="otter", max_tokens=len(tokens))
    assert observed.counts("gen_ai.server.time_to_first_token") == {("text_completion", ""): 1}
    assert bool(observed.counts("gen_ai.server.time_per_output_token")) == (len(tokens) > 1)


async def test_errors_are_counted_by_what_they_were(observed: Observed) -> None:
    router = observed.router
    await router.post("/v1/completions", prompt=["x"] * 5000)
    await router.http.post("/v1/chat/completions", content=b"no json")
    await router.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    router.answers("An otter", fail_after=1, failure=RequestFailed("no worker is left", FailureKind.WORKER_LOST))
    await router.post("/v1/completions", prompt="x")
    await router.post("/v1/completions", prompt="x", stream=True)
    assert observed.counts("gen_ai.server.request.duration") == {
        ("text_completion", "400"): 1,
        ("chat", "400"): 1,
        ("text_completion", "404"): 1,
        ("text_completion", "worker_lost"): 2,
    }
    assert observed.counts("gen_ai.server.time_to_first_token") == {}
    assert [span.attributes["error.type"] for span in observed.spans.spans].count("worker_lost") == 2


async def test_a_client_that_leaves_is_an_end_of_its_own(observed: Observed) -> None:
    router = observed.router
    router.answers("An otter is a mammal.", hang_after=1)
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())
    await until(lambda: bool(observed.spans.spans))
    assert observed.counts("gen_ai.server.request.duration") == {("text_completion", "client_gone"): 1}


async def test_what_is_no_generation_is_not_measured(observed: Observed) -> None:
    for path in ("/health", "/fleet", "/v1/models"):
        await observed.router.http.get(path)
    assert observed.counts("gen_ai.server.request.duration") == {}
    assert observed.spans.spans == []


async def test_a_trace_that_is_not_sampled_goes_on_unrecorded(observed: Observed) -> None:
    headers = {"traceparent": TRACE[:-1] + "0"}
    await observed.router.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
    (request,) = observed.router.dispatcher.requests
    assert re.fullmatch("00-4bf92f3577b34da6a3ce929d0e0e4736-[0-9a-f]{16}-00", request.trace)
    assert observed.spans.spans == []
    assert observed.counts("gen_ai.server.request.duration") == {("text_completion", ""): 1}


def test_the_buckets_are_those_of_the_conventions() -> None:
    assert (
        pytest.approx((0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92))
        == DURATION_S
    )
    assert FIRST_TOKEN_S[:5] == (0.001, 0.005, 0.01, 0.02, 0.04) and FIRST_TOKEN_S[-1] == 10.0
    assert PER_TOKEN_S[:4] == (0.01, 0.025, 0.05, 0.075) and PER_TOKEN_S[-1] == 2.5
