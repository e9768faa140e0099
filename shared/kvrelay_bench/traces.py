"""Request traces: Mooncake's JSON lines, Azure's CSV, and small synthetic traces.

Files of chat conversations (`conversations`) become traces too: they have no arrivals, so these are drawn, and tokens
are estimated from characters.

Mooncake: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 tokens; equal ids after
equal prefixes mean equal tokens). Azure: TIMESTAMP, ContextTokens, GeneratedTokens; its prompts share nothing.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay_bench.conversations import (
    CHARS_PER_TOKEN,
    DEFAULT_ANSWER_TOKENS,
    BadTrace,
    Conversation,
    estimated_tokens,
    holds_conversations,
    read_conversations,
    user_turns,
)

HASH_TOKENS = 512
MAX_HASH_ID = (1 << 31) // HASH_TOKENS - 1
THINK_S = 10.0
"""Mean seconds between the turns of a conversation."""
PIECE_CHARS = HASH_TOKENS * CHARS_PER_TOKEN

__all__ = [
    "BadTrace",
    "TracedRequest",
    "agent_sessions",
    "cold_starts",
    "one_hot_prefix",
    "read_trace",
    "scaled",
]

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request. `hash_ids` name pieces of 512 prompt tokens; the last piece may be shorter."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    session: str = ""
    tenant: str = ""

    def tokens(self) -> Tokens:
        """Token ids; equal hash ids give equal tokens."""
        starts = np.repeat(np.asarray(self.hash_ids, dtype=np.int32) * HASH_TOKENS, HASH_TOKENS)
        within = np.tile(np.arange(HASH_TOKENS, dtype=np.int32), len(self.hash_ids))
        tokens: Tokens = (starts + within)[: self.num_prompt_tokens].astype(np.int32)
        return tokens


def read_trace(
    path: Path, num_requests: int | None = None, *, rate: float | None = None, seed: int = 1
) -> list[TracedRequest]:
    """Reads the first `num_requests` requests (None: all), sorted by arrival from 0. Raises BadTrace.

    `rate`: requests per second of a file of conversations, which has no arrivals (None: 1); only for these.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"--trace: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if holds_conversations(text):
        return conversation_trace(read_conversations(path), rate or 1.0, num_requests, seed)
    if rate is not None:
        raise BadTrace(f"--trace {path}: has its own arrivals: give --speed, not --rate")
    lines = [line for line in text.splitlines() if line.strip()]
    read = _read_csv if lines and lines[0].startswith("TIMESTAMP") else _read_jsonl
    requests = list(itertools.islice(read(path, lines), num_requests))
    if not requests:
        raise BadTrace(f"--trace {path}: contains no request")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]


def conversation_trace(
    conversations: Sequence[Conversation], rate: float, num_requests: int | None = None, seed: int = 1
) -> list[TracedRequest]:
    """Conversations begin as a Poisson process whose rate gives `rate` requests per second in all. The next turn of one
    comes after an exponential time with mean `THINK_S`. A turn's prompt is the whole text before it, so turns share
    prefixes, as do conversations that begin with the same pieces of text."""
    rng = np.random.default_rng((seed, 4))
    turns = [list(user_turns(conversation)) for conversation in conversations]
    if num_requests is not None:
        total, kept = 0, []
        for each in turns:
            kept.append(each[: num_requests - total])
            total += len(kept[-1])
            if total == num_requests:
                break
        turns = kept
    num_turns = sum(map(len, turns))
    starts_s = np.cumsum(rng.exponential(num_turns / len(turns) / rate, len(turns)))
    ids: dict[tuple[int, str], int] = {}
    requests = []
    for number, (start_s, each) in enumerate(zip(starts_s, turns, strict=True)):
        texts = [_padded(turn.text) for turn in each[-1].history]
        whole, arrival_s = "".join(texts), float(start_s)
        known: list[int] = []
        for begin in range(0, max(1, len(whole)), PIECE_CHARS):
            piece = (known[-1] if known else -1, whole[begin : begin + PIECE_CHARS])
            known.append(ids.setdefault(piece, len(ids)))
        if len(ids) > MAX_HASH_ID:
            raise BadTrace(f"--trace: more than {MAX_HASH_ID:,} pieces of {HASH_TOKENS} tokens; take fewer requests")
        for turn in each:
            num_prompt = max(1, sum(map(len, texts[: len(turn.history)])) // CHARS_PER_TOKEN)
            num_output = DEFAULT_ANSWER_TOKENS if turn.answer is None else estimated_tokens(turn.answer)
            used = tuple(known[: -(-num_prompt // HASH_TOKENS)])
            requests.append(TracedRequest(arrival_s, num_prompt, num_output, used, f"conversation-{number}"))
            arrival_s += float(rng.exponential(THINK_S))
    requests.sort(key=lambda request: request.arrival_s)
    return [replace(request, arrival_s=request.arrival_s - requests[0].arrival_s) for request in requests]


def _padded(text: str | None) -> str:
    """The text of a turn in whole tokens; of an answer that the file does not have, as much space."""
    text = " " * (DEFAULT_ANSWER_TOKENS * CHARS_PER_TOKEN) if text is None else text
    return text + " " * (-len(text) % CHARS_PER_TOKEN)


def scaled(requests: Iterable[TracedRequest], rate: float) -> list[TracedRequest]:
    """The same requests with arrivals `rate` times as fast."""
    return [replace(request, arrival_s=request.arrival_s / rate) for request in requests]


def _read_jsonl(path: Path, lines: Sequence[str]) -> Iterable[TracedRequest]:
    fresh = _fresh_ids(path, range(MAX_HASH_ID, -1, -1))
    for number, line in enumerate(lines, 1):
        try:
            entry = _object(json.loads(line))
            num_prompt, num_output = int(entry["input_length"]), int(entry["output_length"])
            arrival_s = float(entry["timestamp"]) / 1e3
            num_ids = -(-num_prompt // HASH_TOKENS)
            ids = [int(each) for each in entry.get("hash_ids") or ()][:num_ids]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise BadTrace(f"--trace {path}, line {number}: {_reason(error)}") from error
        if not isfinite(arrival_s):
            raise BadTrace(f"--trace {path}, line {number}: the timestamp must be a finite number")
        if num_prompt < 1 or num_output < 0 or any(not 0 <= each <= MAX_HASH_ID for each in ids):
            raise BadTrace(f"--trace {path}, line {number}: lengths must be positive, hash_ids 0 to {MAX_HASH_ID}")
        ids += [next(fresh) for _ in range(num_ids - len(ids))]
        yield TracedRequest(arrival_s, num_prompt, max(1, num_output), tuple(ids), str(entry.get("session_id", "")))


def _read_csv(path: Path, lines: Sequence[str]) -> Iterable[TracedRequest]:
    fresh = _fresh_ids(path, range(MAX_HASH_ID + 1))
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            at = _moment(row["TIMESTAMP"])
            num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"--trace {path}, line {number}: {_reason(error)}") from error
        ids = tuple(next(fresh) for _ in range(-(-num_prompt // HASH_TOKENS)))
        yield TracedRequest(at, max(1, num_prompt), max(1, num_output), ids or (next(fresh),))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("it is not a JSON object")
    return value


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def _moment(text: str) -> float:
    """Parses a time to seconds. Without a zone it is UTC, since local time jumps in summer."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _fresh_ids(path: Path, ids: range) -> Iterator[int]:
    """Yields unique ids whose tokens fit 32 bits."""
    yield from ids
    raise BadTrace(f"--trace {path}: more than {len(ids):,} pieces of {HASH_TOKENS} tokens; take fewer requests")


def one_hot_prefix(
    num_requests: int, rate: float, *, prefix: int = 16, tail: int = 1, seed: int = 1
) -> list[TracedRequest]:
    """All prompts have a common prefix of `prefix` pieces and `tail` own pieces; Poisson arrivals."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_requests))
    requests = []
    for number, arrival_s in enumerate(arrivals):
        ids = (*range(prefix), *(prefix + number * tail + i for i in range(tail)))
        requests.append(TracedRequest(float(arrival_s), len(ids) * HASH_TOKENS, 128, ids))
    return requests


def cold_starts(num_requests: int, rate: float, *, pieces: int = 16, seed: int = 1) -> list[TracedRequest]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    fresh = itertools.count()
    requests = []
    for arrival_s in arrivals:
        ids = tuple(next(fresh) for _ in range(int(rng.integers(1, 2 * pieces))))
        requests.append(TracedRequest(float(arrival_s), len(ids) * HASH_TOKENS, 128, ids))
    return requests


def agent_sessions(
    num_sessions: int, rate: float, *, num_turns: int = 12, think_s: float = 4.0, seed: int = 1
) -> list[TracedRequest]:
    """Agent sessions: `rate` starts per second with one of 4 system prompts; each turn extends the prompt."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count(64)
    starts = np.cumsum(rng.exponential(1 / rate, num_sessions))
    requests = []
    for session, start_s in enumerate(starts):
        system, at_s = 8 * int(rng.integers(4)), float(start_s)
        ids = list(range(system, system + 8))
        for _ in range(num_turns):
            ids += [next(fresh) for _ in range(int(rng.integers(1, 4)))]
            requests.append(TracedRequest(at_s, len(ids) * HASH_TOKENS, 128, tuple(ids), f"session-{session}"))
            at_s += float(rng.exponential(think_s)) + 1.0
    return sorted(requests, key=lambda request: request.arrival_s)
