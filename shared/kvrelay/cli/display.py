"""Displays of `kvrelay up` while services start, die and stop."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

STARTING, READY, DIED, STOPPING, STOPPED = "starting", "ready", "died", "stopping", "stopped"
STYLES = {READY: "green", DIED: "red", STOPPED: "dim", STOPPING: "yellow", STARTING: "yellow"}


class Display(AbstractContextManager["Display"]):
    """Shows the states of services, as one line per event: for files, pipes and next to logs."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Shows that a service entered a state."""
        self.note(f"{name:12} {state:9} {detail}".rstrip())

    def note(self, text: str) -> None:
        """Shows a permanent text. Drops it if the output is closed or its disk is full: services are supervised all the
        same."""
        with suppress(OSError, ValueError):
            print(text, file=self._out, flush=True)


class LiveDisplay(Display):
    """A table that is redrawn in place, for terminals."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self._rows: dict[str, tuple[str, str, float]] = {}
        self._spinners: dict[str, Spinner] = {}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Changes the service's row."""
        self._rows[name] = (state, detail, time.monotonic())

    def note(self, text: str) -> None:
        """Prints above the table."""
        self._live.console.print(Text(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, (state, detail, since) in self._rows.items():
            if state in (STARTING, STOPPING):
                spinner = self._spinners.setdefault(name, Spinner("dots"))
                table.add_row(spinner, name, Text(f"{state} {time.monotonic() - since:.0f} s", STYLES[state]), detail)
            else:
                table.add_row("", name, Text(state, STYLES[state]), detail)
        return table


def make_display(out: IO[str], *, plain: bool) -> Display:
    """A live table on a terminal; lines elsewhere or with `plain`."""
    console = Console(file=out)
    return Display(out) if plain or not console.is_terminal else LiveDisplay(console)
