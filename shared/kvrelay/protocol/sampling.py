"""Sampling parameters and outputs as they travel between the services."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrelay.protocol.limits import (
    MOST_LOGPROBS,
    MOST_SAMPLES,
    MOST_STEP_TOKENS,
    Index,
    Int64,
    LogProb,
    NumLogprobs,
    PositiveIndex,
    SampleCount,
    Score,
    Share,
    Text,
    TextTokens,
    TokenId,
    require,
)

SpeculationMethod = Literal["off", "ngram", "suffix"]
EarlyStopping = bool | Literal["never"]
Temperature = Annotated[float, Meta(ge=0.0, le=1000.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
LengthPenalty = Annotated[float, Meta(ge=-10.0, le=10.0)]
LogitBias = dict[TokenId, Annotated[float, Meta(ge=-1000.0, le=1000.0)]]
AllowedTokens = Annotated[tuple[TokenId, ...], Meta(max_length=1 << 20)]
LogprobTokens = Annotated[tuple[TokenId, ...], Meta(max_length=MOST_LOGPROBS)]
StopTokens = Annotated[tuple[TokenId, ...], Meta(max_length=1 << 20)]
ChannelNames = Annotated[tuple[TokenId, ...], Meta(max_length=16)]
ClosingTokens = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=1 << 14)]
BadWords = Annotated[tuple[BadWord, ...], Meta(max_length=1 << 14)]


class GrammarKind(StrEnum):
    """The language of a `Grammar`'s text."""

    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # a grammar in Lark's notation, or in GBNF
    STRUCTURAL_TAG = "structural_tag"  # free text with tagged parts that follow schemas; see `structural_tag.py`


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint, as the client wrote it. The router has compiled it once, so workers know that it can be."""

    kind: GrammarKind
    text: Text
    whitespace: Text | None = None  # a regex for the whitespace between JSON's tokens; None: any


class BeamSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A beam search in place of drawing. Names and meanings are those of `transformers`' generation.

    `early_stopping`: True ends it with `width` finished texts; False when the best live beam, at its present length, is
    worse than the worst of them; "never" only when it could not become better at any length.
    """

    width: SampleCount  # beams that live at a time
    num_returned: SampleCount  # texts to answer with, at most `width`
    length_penalty: LengthPenalty = 1.0  # a text's score is its log-probability / its tokens ** length_penalty
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        require(self.num_returned <= self.width, "more texts are to be returned than there are beams")


class ReasoningSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="span"):
    """Reasoning at the beginning of an output, between two single tokens. A grammar applies behind it."""

    begin_id: TokenId
    end_id: TokenId
    is_open: bool = False  # the prompt has written `begin_id`
    # After that many output tokens of reasoning, without its markers, the next token is `end_id`. None: no limit.
    token_budget: Index | None = None


class ReasoningChannels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="channels"):
    """A budget for reasoning that is written in messages of a channel of its own, among others (harmony).

    Behind the budget a message of reasoning ends with `closing_ids`, which also begin the next message, up to the name
    of its channel. That is one of the others.
    """

    channel_id: TokenId  # comes before the name of a channel
    message_id: TokenId  # begins the text of a message
    start_id: TokenId  # begins a message
    reasoning_id: TokenId  # the name of the channel with the reasoning
    answer_id: TokenId  # the name of the channel with the answer, with which the output ends
    other_ids: ChannelNames = ()  # the first tokens of the names of other channels
    closing_ids: ClosingTokens
    is_open: bool = False  # the prompt has begun a message of reasoning
    token_budget: Index  # for all messages of reasoning together, without their markers


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one sequence are sampled. Values are validated by the router before they get here.

    Random numbers are keyed by (seed, sequence index, position), so a draw depends on neither batch nor worker.
    """

    temperature: Temperature = 1.0  # 0 is greedy
    top_p: TopP = 1.0  # (0, 1]
    top_k: Index = 0  # 0 is off
    min_p: Share = 0.0  # [0, 1]; relative to the most likely token
    presence_penalty: Penalty = 0.0  # over output tokens
    frequency_penalty: Penalty = 0.0  # over output tokens
    repetition_penalty: RepetitionPenalty = 1.0  # over prompt and output tokens
    logit_bias: LogitBias = {}  # token id -> added to its logit
    allowed_token_ids: AllowedTokens = ()  # if there are any, no others are sampled; not for beams
    bad_words: BadWords = ()  # by their tokens: the last is not sampled behind the others; not for beams
    seed: Int64 = 0  # the router draws a missing one
    logprobs: NumLogprobs | None = None  # None: off; k: the token's own logprob and those of the k most likely tokens
    # If there are any, `logprobs` brings those of these tokens, in this order, in place of the most likely.
    logprob_token_ids: LogprobTokens = ()
    prompt_logprobs: NumLogprobs | None = None  # like `logprobs`, for prompt tokens from `logprob_start_len` on
    # Position of the first prompt token that is scored. Cached blocks before it are reused. Token 0 follows nothing.
    logprob_start_len: PositiveIndex = 1
    # Of a prompt that is only scored: so many of its first tokens are those of other prompts of the request, too. Their
    # KV is computed once, also that of a part of a block. 0: not known.
    num_shared: Index = 0
    max_tokens: Index = 16  # output tokens, counting those of earlier attempts; 0 scores the prompt only
    # No end-of-sequence or stop token before that many output tokens, unless a grammar or limits leave no other token.
    min_tokens: Index = 0
    stop_token_ids: StopTokens = ()
    ignore_eos: bool = False
    beams: BeamSpec | None = None  # temperature, truncation and seed do not matter then
    # How next tokens are guessed, which has no effect on the output; None: as the worker's setting says.
    speculation: SpeculationMethod | None = None
    grammar: Grammar | None = None  # the output tokens follow it, and an end-of-sequence token ends it; not for beams
    # Set if the output has a grammar behind it, or a budget; not for beams. With channels, a grammar is of the whole.
    reasoning: ReasoningSpan | ReasoningChannels | None = None

    def num_prompt_scores(self, num_prompt: int) -> int:
        """The number of prompt tokens to score, of `num_prompt`."""
        return 0 if self.prompt_logprobs is None else max(0, num_prompt - self.logprob_start_len)

    @property
    def limits_tokens(self) -> bool:
        """Returns whether some tokens are never sampled, or not behind certain others."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def is_constrained(self) -> bool:
        """Returns whether a grammar or a budget for reasoning decides which tokens may come next."""
        return self.grammar is not None or self.reasoning is not None

    @property
    def follows_output(self) -> bool:
        """Returns whether the tokens that may come next depend on those before."""
        return self.is_constrained or any(len(word) > 1 for word in self.bad_words)


class FinishReason(StrEnum):
    """Why a sequence ended. A failure or a cancelled request is no finish: it travels as `Failed`."""

    STOP_TOKEN = "stop_token"  # an end-of-sequence or stop token; it is the last output token
    STOP_STRING = "stop_string"  # matched by the router
    LENGTH = "length"  # max_tokens, or the model's context is full


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before temperature and penalties)."""

    token_id: TokenId  # the token at this position
    logprob: LogProb
    top_ids: Annotated[list[TokenId], Meta(max_length=MOST_LOGPROBS)]  # most likely first, or as they were asked for
    top_logprobs: Annotated[list[LogProb], Meta(max_length=MOST_LOGPROBS)]


class ScoredText(msgspec.Struct, frozen=True, array_like=True):
    """A finished text of a beam search. `token_ids` includes the end token, if one ended it."""

    token_ids: TextTokens
    score: Score  # logprob / len(token_ids) ** length_penalty
    logprob: Score  # the sum over its tokens, after penalties and biases
    finish: FinishReason


StepLogprobs = Annotated[list[TokenLogprobs], Meta(max_length=MOST_STEP_TOKENS)]
ScoredTexts = Annotated[list[ScoredText], Meta(max_length=MOST_SAMPLES)]
