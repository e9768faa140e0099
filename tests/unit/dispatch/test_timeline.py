"""Percentiles and timelines, made of records and of what workers say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.messages import TimelineEvent
from kvrelay.protocol.sampling import Sampling
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.dispatch.records import (
    PERCENTILES,
    AttemptRecord,
    RequestRecord,
    RequestRecords,
    latency_of,
    percentiles,
    timeline_of,
)


def record(name: str = "r", num_sequences: int = 1) -> RequestRecord:
    return RequestRecord(
        GenerateRequest(request_id=name, prompt_ids=[1, 2], sampling=Sampling(), num_sequences=num_sequences)
    )


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[int]) -> None:
    found = percentiles([float(value) for value in values])
    for p in PERCENTILES:
        oracle = min(value for value in values if 100 * sum(each <= value for each in values) >= p * len(values))
        assert found[f"p{p}"] == oracle


def test_only_what_finished_well_is_measured() -> None:
    records = [record(str(number)) for number in range(4)]
    for number, each in enumerate(records):
        sequence = each.sequences[0]
        sequence.first_token_ms, sequence.finished_ms, sequence.num_output_tokens = 10.0 * (number + 1), 100.0, 4
        each.state = "finished"
    records[2].state = "failed"
    records[3].sequences[0].num_output_tokens = 1
    assert latency_of(records) == {
        "requests": 3,
        "ttft_ms": {"p50": 20.0, "p90": 40.0, "p99": 40.0},
        "tpot_ms": {"p50": 26.667, "p90": 30.0, "p99": 30.0},
    }
    assert latency_of([]) == {"requests": 0, "ttft_ms": {}, "tpot_ms": {}}


def test_a_timeline_has_the_router_and_the_workers_in_order() -> None:
    each = record()
    first = AttemptRecord(1, "p0", "d0", "cost", ("near",), "", 1.0, ended_ms=5.0, failure="p0 is lost")
    second = AttemptRecord(2, "p1", "d0", "cost", (), "p0 is lost", 6.0)
    second.reassigned.append({"decode": "d1", "cause": "d0 is lost", "at_ms": 8.0})
    each.sequences[0].attempts += [first, second]
    each.sequences[0].first_token_ms = 9.0
    begin = each.submitted_unix_s
    events = {
        "p1": [
            TimelineEvent(
                attempt=2, sequence=0, name="chunk", start=begin + 0.007, end=begin + 0.0085, detail={"tokens": 2.0}
            )
        ],
        "d1": [TimelineEvent(attempt=2, sequence=0, name="decode", start=begin + 0.01, detail={})],
    }
    found = timeline_of(each, events)
    assert [(event["lane"], event["name"]) for event in found["events"]] == [
        ("router", "attempt"),
        ("router", "attempt"),
        ("p1", "chunk"),
        ("router", "reassigned"),
        ("router", "first token"),
        ("d1", "decode"),
    ]
    assert found["events"][0]["detail"]["failed"] == "p0 is lost"
    assert found["events"][-1]["end_ms"] is None
    assert found["workers_asked"] == ["d0", "d1", "p0", "p1"]
    assert found["workers_answered"] == ["d1", "p1"]


def test_the_latest_come_first_and_no_more_than_asked_for() -> None:
    records = RequestRecords(3)
    for number in range(5):
        records.add(record(str(number)))
    assert [each.request_id for each in records.latest(10)] == ["4", "3", "2"]
    assert [each.request_id for each in records.latest(1)] == ["4"]
