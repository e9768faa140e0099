"""Workloads: prompts with known sharing, their arrivals, and encoded request bodies.

A prompt is a list of numbers. `ids` sends them as token ids, `text` as one short word each, which is about one token;
the server's `usage` has the exact number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from kvrelay_bench.conversations import (
    DEFAULT_ANSWER_TOKENS,
    Conversation,
    estimated_tokens,
    user_turns,
)
from kvrelay_bench.traces import HASH_TOKENS, TracedRequest

Api = Literal["completions", "chat"]
PromptForm = Literal["ids", "text"]
Arrivals = Literal["poisson", "fixed"]

_ONSETS = ["b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"]
_VOWELS = ["a", "e", "i", "o", "u"]
WORDS = [f"{a}{b}{c}" for a in _ONSETS for b in _VOWELS for c in ("", "n", "t", "st")]

NO_NUMBERS: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: arrival in seconds since the load began, prompt and output length. `messages`: in place of a prompt
    of numbers, pairs of role and text."""

    arrival_s: float
    prompt: NDArray[np.int64]
    num_output: int
    messages: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of synthetic prompts. Lengths are log-normal around the medians; `spread` 0 makes them equal.

    Each prompt begins with one of `num_prefixes` shared prefixes of `num_prefix_tokens` additional tokens.
    """

    num_prompt: int = 200
    num_output: int = 50
    spread: float = 0.0
    num_prefix_tokens: int = 0
    num_prefixes: int = 1


@dataclass(frozen=True, slots=True)
class Wire:
    """Encoding of requests. `token_ids`: range of token ids for `ids`."""

    api: Api = "completions"
    prompt_as: PromptForm = "ids"
    token_ids: tuple[int, int] = (5, 2000)
    ignore_eos: bool = True
    include_usage: bool = True
    extra: dict[str, Any] | None = None

    def body(self, model: str, ask: Ask, salt: int = 0) -> bytes:
        """The JSON body. A different salt gives different tokens with equal lengths and sharing."""
        if ask.messages:
            prompt: Any = "\n\n".join(text for _, text in ask.messages)
            return self._encoded(model, ask, prompt)
        low, high = self.token_ids
        numbers = ask.prompt + salt
        if self.prompt_as == "ids":
            prompt = (numbers % (high - low) + low).tolist()
        else:
            prompt = " ".join(WORDS[number] for number in (numbers % len(WORDS)).tolist())
        return self._encoded(model, ask, prompt)

    def _encoded(self, model: str, ask: Ask, prompt: Any) -> bytes:
        body: dict[str, Any] = {"model": model, "max_tokens": ask.num_output, "temperature": 0, "stream": True}
        if self.api == "chat":
            messages = ask.messages or [("user", prompt)]
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body | (self.extra or {}))


def arrival_times(num_requests: int, rate: float, arrivals: Arrivals, seed: int) -> NDArray[np.float64]:
    """Arrivals of an open loop with `rate` requests per second; the first is at 0."""
    if arrivals == "fixed":
        return np.arange(num_requests) / rate
    gaps = np.random.default_rng((seed, 1)).exponential(1 / rate, num_requests)
    gaps[:1] = 0
    return np.cumsum(gaps)


def synthetic(shape: Shape, arrivals_s: Sequence[float] | NDArray[np.float64], seed: int) -> list[Ask]:
    """One request per arrival. Equal seeds give equal prompts."""
    rng = np.random.default_rng((seed, 2))
    prefixes = rng.integers(0, 1 << 30, (shape.num_prefixes, shape.num_prefix_tokens))
    asks = []
    for arrival_s in arrivals_s:
        own = rng.integers(0, 1 << 30, _length(rng, shape.num_prompt, shape.spread))
        prompt = np.concatenate([prefixes[rng.integers(shape.num_prefixes)], own])
        asks.append(Ask(float(arrival_s), prompt, _length(rng, shape.num_output, shape.spread)))
    return asks


def traced(requests: Sequence[TracedRequest], scale: float, seed: int) -> list[Ask]:
    """The requests of a trace with lengths times `scale`, and with its sharing of prompt pieces.

    A different seed gives different tokens with the same sharing.
    """
    piece = max(1, round(HASH_TOKENS * scale))
    made: dict[int, NDArray[np.int64]] = {}
    asks = []
    for request in requests:
        for each in request.hash_ids:
            if each not in made:
                made[each] = np.random.default_rng((seed, 3, each)).integers(0, 1 << 30, piece)
        num_prompt = max(1, round(request.num_prompt_tokens * scale))
        prompt = np.concatenate([made[each] for each in request.hash_ids])[:num_prompt]
        asks.append(Ask(request.arrival_s, prompt, max(1, round(request.num_output_tokens * scale))))
    return asks


def from_conversations(
    conversations: Sequence[Conversation],
    arrivals_s: Sequence[float] | NDArray[np.float64],
    first: int,
    num_output: int | None,
) -> list[Ask]:
    """One request per arrival: the user's turns of the file from number `first` on, from the beginning again after the
    last. Turns whose history the file does not have are left out. `num_output`: None for about the length of the
    answer in the file."""
    turns = [turn for each in conversations for turn in user_turns(each) if turn.has_history]
    asks = []
    for place, arrival_s in enumerate(arrivals_s, first):
        turn = turns[place % len(turns)]
        length = num_output
        if length is None:
            length = DEFAULT_ANSWER_TOKENS if turn.answer is None else estimated_tokens(turn.answer)
        messages = [(each.role, each.text or "") for each in turn.history]
        asks.append(Ask(float(arrival_s), NO_NUMBERS, length, messages))
    return asks


def _length(rng: np.random.Generator, median: int, spread: float) -> int:
    return max(1, round(median * float(rng.lognormal(0.0, spread)))) if spread else median
