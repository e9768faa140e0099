"""The content of a state: plain text, or messages with possibly an open one at the end. Values, never changed. Texts
that an endpoint received lately are kept, because it has probably computed their beginnings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay_programs.errors import Location, ProgramError
from kvrelay_programs.expressions import Media, Role

Piece = str | Media


@dataclass(frozen=True, slots=True)
class Message:
    """A message. Texts that follow each other are one piece."""

    role: Role
    pieces: tuple[Piece, ...] = ()

    def __add__(self, piece: Piece) -> Message:
        if isinstance(piece, str) and self.pieces and isinstance(self.pieces[-1], str):
            return replace(self, pieces=(*self.pieces[:-1], self.pieces[-1] + piece))
        return replace(self, pieces=(*self.pieces, piece))

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def as_json(self) -> dict[str, Any]:
        if all(isinstance(piece, str) for piece in self.pieces):
            return {"role": self.role, "content": self.text}
        parts = [piece.part if isinstance(piece, Media) else {"type": "text", "text": piece} for piece in self.pieces]
        return {"role": self.role, "content": parts}


@dataclass(frozen=True, slots=True)
class Content:
    """Either `text` or `messages` is empty. The last message is `open` while its block lasts."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    is_open: bool = False

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.messages)

    @property
    def whole_text(self) -> str:
        """The text, or those of all messages with a blank line between them."""
        return "\n\n".join(message.text for message in self.messages) if self.messages else self.text

    @property
    def num_chars(self) -> int:
        """Length of the text, or of that of all messages."""
        return sum(len(message.text) for message in self.messages) + len(self.text)

    @property
    def continued(self) -> Message | None:
        """The open message if it has begun, which an answer continues."""
        return self.messages[-1] if self.is_open and self.messages[-1].pieces else None

    @property
    def closed_messages(self) -> tuple[Message, ...]:
        """Messages before the open one."""
        return self.messages[:-1] if self.is_open else self.messages

    def opened(self, role: Role, location: Location) -> Content:
        if self.text:
            raise ProgramError(f"a block of the {role} behind plain text; put that text into a block", location)
        if self.is_open:
            raise ProgramError(f"a block of the {role} inside one of the {self.messages[-1].role}", location)
        return replace(self, messages=(*self.messages, Message(role)), is_open=True)

    def closed(self) -> Content:
        """Of two messages of a role that follow each other templates make what they like; an empty one is dropped."""
        kept = self.messages if self.messages[-1].pieces else self.messages[:-1]
        return replace(self, messages=kept, is_open=False)

    def added(self, piece: Piece, location: Location | None = None) -> Content:
        if self.is_open:
            return replace(self, messages=(*self.messages[:-1], self.messages[-1] + piece))
        if isinstance(piece, Media):
            raise ProgramError("an image or a video outside of a block of the user", location)
        if self.messages:
            raise ProgramError("text outside of a block, behind messages; put it into a block", location)
        return replace(self, text=self.text + piece)

    def check_can_generate(self, what: str, location: Location) -> None:
        """Raises ProgramError if an answer cannot stand here."""
        if self.is_chat and not (self.is_open and self.messages[-1].role == "assistant"):
            raise ProgramError(f"{what} outside of a block of the assistant", location)
        if self.is_open and not self.closed_messages:
            raise ProgramError(f"{what} in the first message; a chat begins with the system or the user", location)
        if not self.is_chat and not self.text:
            raise ProgramError(f"{what} behind no text at all", location)


def chat_fields(content: Content, ending: str = "") -> dict[str, Any]:
    """The fields of a chat request whose answer continues `content` and `ending`."""
    messages: Sequence[Message] = content.closed_messages
    last = content.continued
    if ending:
        last = (last or Message("assistant")) + ending
    if last is None:
        return {"messages": [message.as_json for message in messages]}
    return {
        "messages": [*(message.as_json for message in messages), last.as_json],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


MOST_KEPT = 16


def num_common(one: Sequence[object], other: Sequence[object], least: int = 0) -> int:
    """Number of items at the beginning that are the same, of which `least` are known to be.

    Bisects, as comparing slices is much faster than comparing items.
    """
    most = min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class SentTexts:
    """The last few texts. Used on one event loop."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=MOST_KEPT)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def num_known(self, text: str) -> int:
        """Number of characters at the beginning of `text` with which one of the kept texts begins, too."""
        longest = 0
        for known in self._texts:
            # Most texts of a batch differ in what is behind the longest beginning found so far, or before.
            if known[: longest + 1] == text[: longest + 1]:
                longest = num_common(known, text, longest)
        return longest
