"""What `kvrelay up` shows."""

from __future__ import annotations

import io
import os

from rich.console import Console

from kvrelay.cli.supervisor import DIED, READY, STARTING, Display, LiveDisplay, make_display


def test_an_output_that_takes_nothing_ends_no_supervision() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as pipe, open("/dev/full", "wb", buffering=0) as full:
        for output in (pipe, full):
            Display(io.TextIOWrapper(output, write_through=True)).update("decode-0", DIED, "was killed")


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with make_display(out, plain=False) as display:
        display.update("router", STARTING)
        display.update("router", READY, "after 0.5 s")
        display.note("read this")
    assert type(display) is Display
    assert out.getvalue() == "router       starting\nrouter       ready     after 0.5 s\nread this\n"


def test_a_table_on_a_terminal_ends_with_the_last_state_and_keeps_notes() -> None:
    out = io.StringIO()
    with LiveDisplay(Console(file=out, force_terminal=True, width=100)) as display:
        display.update("prefill-0", STARTING, "[red]log[/red]")
        display.note("curl 'http://x' -d '[1]'")
        display.update("prefill-0", READY, "after 0.5 s")
    text = out.getvalue()
    assert "curl 'http://x' -d '[1]'" in text
    last = text[text.rindex("prefill-0") :]
    assert "ready" in last
    assert "after 0.5 s" in last
