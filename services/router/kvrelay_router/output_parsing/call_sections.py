"""Reads calls that stand one after the other in a section, each between two markers."""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from kvrelay_router.output_parsing.json_calls import JsonReader
from kvrelay_router.output_parsing.text_parser import Malformed, Markers, NewId, Steps, new_call_id


class SectionMarkers(msgspec.Struct, frozen=True):
    begin: str
    call_begin: str
    call_end: str
    end: str

    @property
    def all(self) -> tuple[str, ...]:
        return self.begin, self.call_begin, self.call_end, self.end


class SectionReader(JsonReader):
    """A call may also stand without a section, and the section may lack its end."""

    def __init__(self, markers: SectionMarkers, new_id: NewId = new_call_id) -> None:
        super().__init__(markers.call_end, new_id)
        self._markers = markers
        self._opens = Markers(markers.begin, markers.call_begin)

    @abstractmethod
    def _call(self) -> Steps[None]:
        """Reads what is between the markers of a call. Raises Malformed."""

    def _parse(self) -> Steps[None]:
        while (opened := (yield from self._until(self._opens, self._content))) is not None:
            self._begin_head(opened)
            try:
                if opened == self._markers.begin:
                    yield from self._skip_spaces()
                    yield from self._expect(self._markers.call_begin)
                yield from self._section()
            except Malformed:
                self._give_up()

    def _section(self) -> Steps[None]:
        while True:
            yield from self._call()
            yield from self._skip_spaces()
            yield from self._expect(self._markers.call_end)
            self._end_call()
            yield from self._skip_spaces()
            if (yield from self._skip(self._markers.end)):
                self._drop_head()
                return
            yield from self._expect(self._markers.call_begin)
