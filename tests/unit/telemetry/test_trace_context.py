"""W3C trace context: what is taken, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.telemetry.tracer import TraceContext, new_trace, parse_traceparent, sampled, trace_fields

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read_back(trace_id: int, span_id: int, is_sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, is_sampled)
    assert parse_traceparent(str(context)) == context
    assert sampled(str(context)) == (context if is_sampled else None)
    assert trace_fields(str(context)) == {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has four fields
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None
    assert sampled(text) is None
    assert trace_fields(text) == {}


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_the_sampled_flag_is_one_bit(flags: str, is_sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None and context.is_sampled is is_sampled


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    context = parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-then")
    assert context is not None and str(context) == f"00-{TRACE}-{SPAN}-01"


def test_a_child_is_of_the_same_trace_and_a_span_of_its_own() -> None:
    parent = new_trace(is_sampled=True)
    children = {parent.child() for _ in range(100)}
    assert {child.trace_id for child in children} == {parent.trace_id}
    assert len({child.span_id for child in children} | {parent.span_id}) == 101
