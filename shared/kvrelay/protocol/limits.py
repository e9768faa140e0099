"""The values that fields of messages may have, as types that the decoder checks.

A limit rejects what no correct peer sends. It is no policy: the router's limits for clients are narrower, and a worker
also compares with its own model and pool (`kvrelay.worker.requests`). Rules between the fields of a struct are in its
`__post_init__`, which the decoder calls.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

from kvrelay.process_identity import IDENTITY_PATTERN, MOST_IDENTITY_CHARS

MOST_INT64, LEAST_INT64 = 2**63 - 1, -(2**63)
MOST_INT32 = 2**31 - 1
MOST_FLOAT = sys.float_info.max
MOST_SAMPLES = 1024
MOST_LOGPROBS = 1024
MOST_SECONDS = 1e9
MOST_TEXT_CHARS = 1 << 20
MOST_STEP_TOKENS = 1 << 16
MOST_TEXT_TOKENS = 1 << 24
MOST_SEQUENCES = 1 << 16
MOST_BLOCKS = 1 << 24
MOST_BOUNDS = 1 << 12
MOST_EVENTS = 1 << 20
MOST_PEERS = 1 << 16
MOST_ENDED_SESSIONS = 1 << 14

Int64 = Annotated[int, Meta(ge=LEAST_INT64, le=MOST_INT64)]
Count = Annotated[int, Meta(ge=0, le=MOST_INT64)]
"""A number of things, or a number that only grows."""
Index = Annotated[int, Meta(ge=0, le=MOST_INT32)]
PositiveIndex = Annotated[int, Meta(ge=1, le=MOST_INT32)]
"""A position among tokens, blocks, samples or attempts."""
TokenId = Annotated[int, Meta(ge=0, le=MOST_INT32)]

StepTokens = Annotated[list[TokenId], Meta(max_length=MOST_STEP_TOKENS)]
"""The tokens of one step and sequence."""
TextTokens = Annotated[list[TokenId], Meta(max_length=MOST_TEXT_TOKENS)]
"""A whole text."""

Blocks = Annotated[list[Index], Meta(max_length=MOST_BLOCKS)]

NumLogprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
"""Alternatives at a position."""
SampleCount = Annotated[int, Meta(ge=1, le=MOST_SAMPLES)]
SiblingCount = Annotated[int, Meta(ge=0, le=MOST_SAMPLES)]

Opaque = Annotated[str, Meta(max_length=64)]
"""The digest of a client's name of something."""
Weight = Annotated[float, Meta(ge=0.001, le=1000.0)]
EndedSessions = Annotated[list[Opaque], Meta(max_length=MOST_ENDED_SESSIONS)]

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]
Finite = Annotated[float, Meta(ge=-MOST_FLOAT, le=MOST_FLOAT)]
NotNegative = Annotated[float, Meta(ge=0.0, le=MOST_FLOAT)]
"""Finite too."""
LogProb = Annotated[float, Meta(le=1.0)]
"""Minus infinity is legal (a masked token), NaN is not. Rounding may bring it slightly above 0."""
LogProbs = Annotated[list[LogProb], Meta(max_length=MOST_STEP_TOKENS)]
Score = Annotated[float, Meta(le=MOST_FLOAT)]
"""Of a text. Minus infinity is legal, NaN is not."""

Name = Annotated[str, Meta(max_length=1024)]
"""An id, an address or the name of a thing."""
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARS)]
"""Texts for readers, or for a parser with limits of its own."""
ProcessIdentity = Annotated[str, Meta(max_length=MOST_IDENTITY_CHARS, pattern=rf"\A(?:{IDENTITY_PATTERN})?\Z")]
"""See `kvrelay.process_identity`. Empty: unknown."""
Transports = Annotated[list[Name], Meta(max_length=16)]
Endpoint = Annotated[dict[Name, Text], Meta(max_length=64)]
MOST_RANKS = 64
"""The most ranks of a worker."""
RankCount = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Endpoints = Annotated[list[Endpoint], Meta(min_length=1, max_length=MOST_RANKS)]
ProcessIdentities = Annotated[list[ProcessIdentity], Meta(max_length=MOST_RANKS)]
"""A transport's own address of a pool: read by the transport."""


def require(holds: bool, text: str) -> None:
    """For the `__post_init__` of a struct with rules between its fields. Raises ValueError."""
    if not holds:
        raise ValueError(text)
