"""Checks the fields of a request against the model's limits, and converts them to sampling parameters."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from kvrelay.kv.table import blocks_for_group
from kvrelay.protocol.sampling import BadWords, Grammar, ReasoningChannels, ReasoningSpan, Sampling
from kvrelay.text.choice import StopRules
from kvrelay.text.request.api_error import ApiError, context_length_exceeded, no_worker_ready, wrong
from kvrelay.text.request.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.tokenizer_files import SamplingDefaults

Number = TypeVar("Number", int, float)

LARGEST_TOP_K = 2**31 - 1
"""Larger than any vocabulary, so the same as no limit, and within 32 bits."""

SUPPRESSED = -1e9
"""The bias of a token that the model's defaults suppress. It is finite because a grammar may leave no other token."""

MAX_NAMED = 8
"""Wrong token ids that an error names."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the ready workers. `max_model_len` counts prompt and output tokens of a sequence.

    `max_running` (sequences at a time), `num_blocks` and `block_size` are those of decode workers; 0 if there is none.
    `jump_forward`: whether all workers let forced tokens join without being sampled.
    """

    max_model_len: int
    vocab_size: int
    max_running: int = 0
    num_blocks: int = 0
    block_size: int = 0
    jump_forward: bool = False


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens to generate. If `asked` is None: `default`, or `model_default` if that is None, or else all that
    the context leaves. `param` names the field for error messages.
    """

    asked: int | None
    default: int | None
    model_default: int | None = None
    param: str = "max_tokens"

    def prompt_room(self, limits: ModelLimits) -> int:
        """The longest prompt, in tokens, that leaves room for this output; at least one token without a default."""
        reserved = self.default or 1 if self.asked is None else self.asked
        return limits.max_model_len - reserved


def check_token_ids(token_ids: list[int], limits: ModelLimits, param: str) -> None:
    """Raises 400 for ids outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        bad = [each for each in token_ids if not 0 <= each < limits.vocab_size]
        more = f" and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        named = f"id {bad[0]} is" if len(bad) == 1 else f"ids {', '.join(map(str, bad[:MAX_NAMED]))}{more} are"
        raise ApiError(
            f"Token {named} out of range; the vocabulary has {limits.vocab_size} tokens",
            param=param,
            code="invalid_value",
        )


def check_tokenized(token_ids: list[int], tokenizer_size: int, limits: ModelLimits, param: str) -> None:
    """Raises 400 for tokens that the tokenizer has beyond the model's vocabulary."""
    if tokenizer_size > limits.vocab_size:
        check_token_ids(token_ids, limits, param)


def check_vocabulary(fields: GenerationFields, limits: ModelLimits) -> None:
    """Raises 400 for token ids in the fields that the model does not have."""
    check_token_ids(list(fields.logit_bias), limits, "logit_bias")
    check_token_ids(fields.stop_token_ids, limits, "stop_token_ids")
    check_token_ids(fields.allowed_token_ids, limits, "allowed_token_ids")
    check_token_ids(fields.logprob_token_ids, limits, "logprob_token_ids")


def check_bad_words(fields: GenerationFields, bad_words: BadWords, limits: ModelLimits) -> None:
    """Raises 400 for bad words with tokens that the model does not have, or that forbid all allowed tokens."""
    check_token_ids([token_id for word in bad_words for token_id in word], limits, "bad_words")
    if fields.allowed_token_ids and {word[0] for word in bad_words if len(word) == 1}.issuperset(
        fields.allowed_token_ids
    ):
        raise wrong("bad_words", "they forbid all of 'allowed_token_ids'")


def allowed_output(num_prompt_tokens: int, output: RequestedOutput, limits: ModelLimits, param: str) -> int:
    """Returns the maximum number of tokens to generate. Raises 400 if prompt and output exceed the context."""
    context = limits.max_model_len
    room = context - num_prompt_tokens
    if room < 0 or (room == 0 and output.asked != 0):
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens, but the prompt has {num_prompt_tokens} tokens"
            + (", which leaves no room for output" if room == 0 else ""),
            param,
        )
    if output.asked is None:
        most = output.model_default if output.default is None else output.default
        return room if most is None else min(room, most)
    if output.asked > room:
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens, but {num_prompt_tokens + output.asked} tokens "
            f"were asked for ({num_prompt_tokens} in the prompt, {output.asked} in '{output.param}')",
            output.param,
        )
    return output.asked


def completion_output(request: CompletionRequest, defaults: SamplingDefaults) -> RequestedOutput:
    """The length of a completion: the model's default, or else OpenAI's, if the request gives none."""
    default = DEFAULT_MAX_TOKENS if defaults.max_tokens is None else None
    return RequestedOutput(asked=request.max_tokens, default=default, model_default=defaults.max_tokens)


def check_group(fields: GenerationFields, num_prompt_tokens: int, max_tokens: int, limits: ModelLimits) -> None:
    """Raises 400 if no worker could hold the beams of a search, or the first tokens of a prompt's samples; 503 while no
    worker runs beam searches.

    All beams run at the same time. Samples start so, and those that outgrow a worker later take turns. Single tokens
    are computed by prefill, one sample after another.
    """
    beams, param = fields.beams, "n" if fields.best_of is None else "best_of"
    if beams is not None:
        if not limits.max_running:
            raise no_worker_ready("No decode worker that runs beam searches is ready", 1.0)
        what, width, length = "beams", beams.width, max_tokens
        most = min(limits.max_running, limits.vocab_size)
    elif fields.num_sequences == 1 or max_tokens <= 1 or not limits.max_running:
        return
    else:
        what, width, length, most = "samples", fields.num_sequences, 1, limits.max_running
    if width > most:
        raise wrong(param, f"{width} {what} are too many, the workers run up to {most} sequences")
    needed = blocks_for_group(num_prompt_tokens, num_prompt_tokens + length, width, limits.block_size)
    if needed > limits.num_blocks:
        raise context_length_exceeded(
            f"{width} {what} of up to {length} tokens after {num_prompt_tokens} of the prompt may take {needed} blocks "
            f"of {limits.block_size} tokens; a worker has {limits.num_blocks}",
            param,
        )


def make_sampling(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: BadWords = (),
    grammar: Grammar | None = None,
    reasoning: ReasoningSpan | ReasoningChannels | None = None,
) -> Sampling:
    """Returns the sampling parameters for workers, with `defaults` for fields that are not set. `grammar`: in place of
    the request's own. Raises ApiError for what does not fit the prompt, its output or the workers."""
    check_group(fields, num_prompt_tokens, max_tokens, limits)
    start = fields.logprob_start_len
    if start is not None and start >= num_prompt_tokens > 0:
        raise wrong("logprob_start_len", f"{start} is not a position in a prompt of {num_prompt_tokens} tokens")
    if fields.min_tokens is not None and fields.min_tokens > max_tokens:
        raise wrong("min_tokens", f"{fields.min_tokens} is more than the {max_tokens} tokens to generate")
    grammar = grammar or fields.grammar
    min_tokens = min(_or(fields.min_tokens, defaults.min_tokens), max_tokens)
    suppressed = {each: SUPPRESSED for each in defaults.suppressed_ids if 0 <= each < limits.vocab_size}
    if fields.use_beam_search:
        defaults = replace(defaults, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    ends_with_grammar = fields.ignore_eos and grammar is not None
    return Sampling(
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=_or(fields.top_p, defaults.top_p),
        top_k=min(_or(fields.top_k, defaults.top_k), LARGEST_TOP_K),
        min_p=_or(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias={**suppressed, **fields.logit_bias},
        allowed_token_ids=tuple(dict.fromkeys(fields.allowed_token_ids)),
        bad_words=bad_words,
        # All signed 64-bit integers, as clients may choose.
        seed=secrets.randbits(64) - 2**63 if fields.seed is None else fields.seed,
        logprobs=logprobs,
        logprob_token_ids=tuple(fields.logprob_token_ids),
        prompt_logprobs=prompt_logprobs,
        logprob_start_len=max(start or 0, 1),
        max_tokens=max_tokens,
        # A grammar that has ended leaves nothing but the end.
        min_tokens=max_tokens if ends_with_grammar else min_tokens,
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids)),
        ignore_eos=fields.ignore_eos and not ends_with_grammar,
        beams=fields.beams,
        speculation=fields.speculation,
        grammar=grammar,
        reasoning=reasoning,
    )


def stop_rules(fields: GenerationFields, defaults: SamplingDefaults) -> StopRules:
    """Stop conditions that the router applies to a text."""
    min_tokens = _or(fields.min_tokens, defaults.min_tokens)
    strings = fields.stop or ([] if fields.use_beam_search else [*defaults.stop])
    return StopRules(strings, frozenset(fields.stop_token_ids), min_tokens, fields.keeps_stop_string)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
