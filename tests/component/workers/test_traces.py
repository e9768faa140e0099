"""One request is one trace over router, prefill, handoff and decode, also when workers die on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvrelay.protocol.sampling import Sampling
from kvrelay.telemetry.otlp import Export
from kvrelay.telemetry.tracer import TraceContext, new_trace
from kvrelay_router.dispatch.interface import GenerateRequest
from tests.component.workers.rig import prompt_of
from tests.fakes.delta_reader import read_batches
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.spans import RecordedSpans
from tests.fakes.waiting import PATIENCE_S
from tests.faults.local_fleet import MAX_MODEL_LEN, LocalFleet, local_fleet

OF_A_HANDOFF = ["kvrelay.decode", "kvrelay.handoff.receive", "kvrelay.handoff.send", "kvrelay.prefill"]
PROMPT = prompt_of(150)  # four chunks


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> RecordedSpans:
    """Of all services on this event loop."""
    recorded = RecordedSpans()
    monkeypatch.setattr("kvrelay.worker.shell.open_export", lambda service, instance: Export(recorded.tracer))
    return recorded


async def generate(fleet: LocalFleet, trace: TraceContext, max_tokens: int = 20, num_sequences: int = 1) -> None:
    """To its end, which is that of an undisturbed run."""
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest(
        request_id=f"{trace.span_id:x}",
        prompt_ids=PROMPT,
        sampling=sampling,
        num_sequences=num_sequences,
        trace=str(trace),
    )
    outputs: list[list[int]] = [[] for _ in range(num_sequences)]
    async for deltas in read_batches(fleet.dispatcher.submit(request)):
        for delta in deltas:
            outputs[delta.sequence] += delta.token_ids
    expected = [expected_tokens(PROMPT, sampling, MAX_MODEL_LEN, index) for index in range(num_sequences)]
    assert outputs == expected


async def until(condition: Callable[[], bool]) -> None:
    """Looks in every turn of the event loop, so that no state of a worker on it is missed."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


def worker(fleet: LocalFleet, role: str, runs: bool) -> str | None:
    """One of this role that has, or has not, a sequence among those that run."""
    found = [n for n, w in fleet.workers.items() if w.config.role == role and bool(w.context.scheduler.running) == runs]
    return found[0] if found else None


async def generate_while_one_dies(
    fleet: LocalFleet, trace: TraceContext, find_victim: Callable[[], str | None], max_tokens: int = 20
) -> None:
    """As `generate`; the first worker that is found dies at that moment."""
    request = asyncio.create_task(generate(fleet, trace, max_tokens))
    await until(lambda: find_victim() is not None)
    victim = find_victim()
    assert victim is not None
    fleet.kill(victim)
    await request
    await fleet.until_clean()


async def test_a_request_is_one_trace_with_links_from_its_steps(redis_url: str, spans: RecordedSpans) -> None:
    trace = new_trace(is_sampled=True)
    async with local_fleet(redis_url, 1, 1, lambda: HashRunner(numerics="amx"), tracer=spans.tracer) as fleet:
        await generate(fleet, trace)
        await fleet.until_clean()
    spans.check_parents(trace.trace_id, trace)
    (attempt,) = spans.of(trace.trace_id, "kvrelay.attempt")
    assert attempt.parent == trace
    assert attempt.attributes["kvrelay.numerics"] == ("amx",)
    assert spans.children(attempt) == OF_A_HANDOFF
    assert {attempt.attributes[f"kvrelay.worker.{role}"] for role in ("prefill", "decode")} == {"prefill-0", "decode-0"}
    (prefill,) = spans.of(trace.trace_id, "kvrelay.prefill")
    (decode,) = spans.of(trace.trace_id, "kvrelay.decode")
    assert "kvrelay.compute" in spans.children(prefill)
    assert prefill.attributes["kvrelay.chunks"] == 4
    assert decode.attributes["kvrelay.output_tokens"] == 19  # the first came from prefill
    assert decode.attributes["kvrelay.finish"] == "length"
    (sent,) = spans.of(trace.trace_id, "kvrelay.handoff.send")
    (received,) = spans.of(trace.trace_id, "kvrelay.handoff.receive")
    assert sent.attributes["kvrelay.handoff.blocks"] == received.attributes["kvrelay.handoff.blocks"] == 10
    steps = [span for span in spans.spans if span.name == "kvrelay.step"]
    assert [step.links for step in steps] == [[prefill.context]] * 4
    assert len({step.context.trace_id for step in steps} | {trace.trace_id}) == 5
    assert sum(int(str(step.attributes["kvrelay.step.prefill_tokens"])) for step in steps) == len(PROMPT)
    assert len(spans.spans) == 6 + len(spans.of(trace.trace_id, "kvrelay.queue")) + len(steps)


async def test_every_sequence_has_its_own_attempt(redis_url: str, spans: RecordedSpans) -> None:
    trace = new_trace(is_sampled=True)
    async with local_fleet(redis_url, 1, 1, HashRunner, tracer=spans.tracer) as fleet:
        await generate(fleet, trace, num_sequences=3)
        await fleet.until_clean()
    spans.check_parents(trace.trace_id, trace)
    attempts = spans.of(trace.trace_id, "kvrelay.attempt")
    assert sorted(int(str(span.attributes["kvrelay.sequence"])) for span in attempts) == [0, 1, 2]
    assert all(spans.children(attempt) == OF_A_HANDOFF for attempt in attempts)


async def test_nothing_is_recorded_of_a_trace_that_nobody_samples(redis_url: str, spans: RecordedSpans) -> None:
    async with local_fleet(redis_url, 1, 1, HashRunner, tracer=spans.tracer) as fleet:
        await generate(fleet, new_trace(is_sampled=False))
        await fleet.until_clean()
        for each in fleet.workers.values():
            assert not each.started.reports._observer._sequences
    assert spans.spans == []


async def test_the_trace_goes_on_when_prefill_dies(
    redis_url: str, spans: RecordedSpans, caplog: pytest.LogCaptureFixture
) -> None:
    trace = new_trace(is_sampled=True)
    async with local_fleet(redis_url, 2, 1, lambda: HashRunner(step_s=0.05), tracer=spans.tracer) as fleet:
        await generate_while_one_dies(fleet, trace, lambda: worker(fleet, "prefill", runs=True))
    spans.check_parents(trace.trace_id, trace)
    first, second = spans.of(trace.trace_id, "kvrelay.attempt")
    assert first.parent == second.parent == trace
    assert first.error is not None and "is lost" in first.error
    assert second.error is None and second.attributes["kvrelay.retry.cause"] == first.error
    (line,) = [record for record in caplog.records if record.getMessage().startswith("attempt 2: ")]
    named = vars(line)
    assert named["trace_id"] == f"{trace.trace_id:032x}"
    assert named["span_id"] == f"{first.context.span_id:016x}"  # of the attempt that failed
    assert set(spans.children(first)) <= {"kvrelay.handoff.receive"}  # what prefill had noted went with it
    assert spans.children(second) == OF_A_HANDOFF


async def test_the_trace_goes_on_when_decode_dies_before_it_committed(redis_url: str, spans: RecordedSpans) -> None:
    trace = new_trace(is_sampled=True)
    async with local_fleet(redis_url, 1, 2, lambda: HashRunner(step_s=0.05), tracer=spans.tracer) as fleet:

        def asked_while_prefill_computes() -> str | None:
            asked = [name for name in fleet.living("decode") if fleet.workers[name].started.role.num_open]
            assert not asked or worker(fleet, "prefill", runs=True) is not None
            return asked[0] if asked else None

        await generate_while_one_dies(fleet, trace, asked_while_prefill_computes)
    spans.check_parents(trace.trace_id, trace)
    (attempt,) = spans.of(trace.trace_id, "kvrelay.attempt")
    assert attempt.attributes["kvrelay.reassigned"] == 1
    lost, sent = spans.of(trace.trace_id, "kvrelay.handoff.send")
    assert lost.error in ("decode_lost", "reassigned")  # whoever of prefill and router sees it first
    assert sent.error is None
    assert lost.parent == sent.parent == attempt.context
    assert spans.children(attempt) == sorted([*OF_A_HANDOFF, "kvrelay.handoff.send"])


async def test_the_trace_goes_on_when_decode_dies_in_the_middle_of_its_tokens(
    redis_url: str, spans: RecordedSpans
) -> None:
    trace = new_trace(is_sampled=True)
    async with local_fleet(redis_url, 1, 2, lambda: HashRunner(step_s=0.02), tracer=spans.tracer) as fleet:
        await generate_while_one_dies(fleet, trace, lambda: worker(fleet, "decode", runs=True), max_tokens=50)
    spans.check_parents(trace.trace_id, trace)
    attempts = spans.of(trace.trace_id, "kvrelay.attempt")
    assert all(attempt.parent == trace for attempt in attempts)
    assert "kvrelay.decode" not in spans.children(attempts[0])
    assert "kvrelay.prefill" in spans.children(attempts[0])
    assert "kvrelay.decode" in spans.children(attempts[-1])
    assert [attempt.error is None for attempt in attempts] == [False] * (len(attempts) - 1) + [True]
