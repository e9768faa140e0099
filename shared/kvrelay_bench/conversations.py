"""Files of chat conversations: ShareGPT, MT-Bench, Alpaca, and the messages of OpenAI's API.

A file is a JSON array or has one JSON object per line. An object holds one of:

- `conversations`: turns with `from` (human, user, gpt, assistant, system ...) and `value` (ShareGPT);
- `messages`: turns with `role` and `content` (OpenAI);
- `turns`: the user's turns alone, as texts (MT-Bench);
- `instruction` and perhaps `input` and `output` (Alpaca);
- `prompt` or `question`, and perhaps `completion`, `response`, `output` or `answer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHARS_PER_TOKEN = 4
"""English text has about so many characters per token; files of conversations have no token counts."""
DEFAULT_ANSWER_TOKENS = 200
"""Assumed length of an answer that the file does not have."""
FORMS = "conversations (ShareGPT), messages, turns (MT-Bench), instruction (Alpaca), prompt or question"

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
_ANSWERS = ("completion", "response", "output", "answer")


class BadTrace(ValueError):
    """An invalid trace or file of conversations. The message names file, line and fault."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`role`: system, user or assistant. `text`: None for an answer that the file does not have."""

    role: str
    text: str | None


Conversation = Sequence[Turn]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """One request: the turns up to one of the user, and the answer in the file, if it has one."""

    history: Conversation
    answer: str | None

    @property
    def has_history(self) -> bool:
        """Returns whether the file has all answers before this turn."""
        return all(turn.text is not None for turn in self.history)


def read_conversations(path: Path, flag: str = "--trace") -> list[Conversation]:
    """Reads a file, without turns of other roles such as tools. Raises BadTrace, which names `flag`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{flag}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    found: list[Conversation] = []
    for place, entry in _entries(f"{flag} {path}", text):
        try:
            turns = _turns(entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadTrace(f"{flag} {path}, {place}: it is no conversation: {type(error).__name__}: {error}") from error
        if any(turn.role == "user" for turn in turns):
            found.append(turns)
    if not found:
        raise BadTrace(f"{flag} {path}: contains no conversation")
    return found


def holds_conversations(text: str) -> bool:
    """Returns whether a file's text looks like conversations and not like a trace."""
    start = text.lstrip().removeprefix("[").lstrip()
    try:
        entry, _ = json.JSONDecoder().raw_decode(start)
    except ValueError:
        return False
    return isinstance(entry, dict) and "input_length" not in entry and _form(entry) is not None


def user_turns(conversation: Conversation) -> Iterator[UserTurn]:
    """The requests of a conversation in their order."""
    for place, turn in enumerate(conversation):
        if turn.role == "user":
            following = conversation[place + 1] if place + 1 < len(conversation) else None
            answer = following.text if following is not None and following.role == "assistant" else None
            yield UserTurn(conversation[: place + 1], answer)


def estimated_tokens(text: str) -> int:
    return max(1, round(len(text) / CHARS_PER_TOKEN))


def _entries(name: str, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if text.lstrip().startswith("["):
        try:
            entries = [(f"entry {number}", entry) for number, entry in enumerate(json.loads(text), 1)]
        except ValueError as error:
            raise BadTrace(f"{name}: {error}") from error
    else:
        entries = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    entries.append((f"line {number}", json.loads(line)))
                except ValueError as error:
                    raise BadTrace(f"{name}, line {number}: {error}") from error
    for place, entry in entries:
        if not isinstance(entry, dict) or _form(entry) is None:
            raise BadTrace(f"{name}, {place}: it has none of {FORMS}")
        yield place, entry


def _form(entry: Mapping[str, Any]) -> str | None:
    names = ("conversations", "messages", "turns", "instruction", "prompt", "question")
    return next((name for name in names if entry.get(name) is not None), None)


def _turns(entry: Mapping[str, Any]) -> list[Turn]:
    match _form(entry):
        case "conversations":
            turns = [(str(each["from"]), each["value"]) for each in entry["conversations"]]
        case "messages":
            turns = [(str(each["role"]), each["content"]) for each in entry["messages"]]
        case "turns":
            return [turn for text in entry["turns"] for turn in (Turn("user", _text(text)), Turn("assistant", None))]
        case "instruction":
            more = f"\n\n{entry['input']}" if entry.get("input") else ""
            turns = [("user", f"{_text(entry['instruction'])}{more}"), *_answer(entry)]
        case form:
            turns = [("user", entry[str(form)]), *_answer(entry)]
    return [Turn(_ROLES[role.lower()], _text(text)) for role, text in turns if role.lower() in _ROLES]


def _answer(entry: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return next(([("assistant", entry[name])] for name in _ANSWERS if isinstance(entry.get(name), str)), [])


def _text(content: Any) -> str:
    """The text of a message, or of the text parts of its content. Raises TypeError."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if content is None:
        return ""
    raise TypeError(f"{type(content).__name__} in place of a text")
