"""Turns messages into what the scheduler takes: prompts into sequences, after the checks that a worker makes itself,
and the candidates of a beam search from and to the wire's form."""

from __future__ import annotations

import numpy as np

from kvrelay.kv.hashing import root_hash
from kvrelay.kv.table import BlockTable, blocks_for, blocks_for_group
from kvrelay.protocol.messages import Header, PackedCandidates, PeerRef, Prompt, unpack_tokens
from kvrelay.protocol.sampling import BeamSpec
from kvrelay.scheduling.sequence import Origin, Sequence, TokenBuffer
from kvrelay.step.batch import BeamCandidates, ModelSpec


class PromptRefused(ValueError):
    """A prompt that this worker can never run. The router should have refused it."""


def sequence_key(header: Header) -> tuple[str, int, int]:
    """The key of the sequence that a message is about."""
    return header.request, header.attempt, header.sequence


def make_sequence(
    header: Header, prompt: Prompt, router: PeerRef, spec: ModelSpec, max_running: int | None = None
) -> Sequence:
    """Returns a waiting sequence. `max_running` is the limit of the scheduler that runs its output, or None if this
    worker only prefills. Raises PromptRefused."""
    tokens = unpack_tokens(prompt.tokens)
    if not 0 <= prompt.num_output < len(tokens):
        raise PromptRefused(f"a prompt of {len(tokens)} tokens of which {prompt.num_output} are output")
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.vocab_size:
        raise PromptRefused(f"a token id outside [0, {spec.vocab_size})")
    num_fed = len(tokens) + (1 if prompt.sampling.max_tokens > prompt.num_output else 0)
    if num_fed > spec.max_model_len:
        raise PromptRefused(f"{len(tokens)} tokens do not fit max_model_len {spec.max_model_len}")
    longest = min(len(tokens) - prompt.num_output + prompt.sampling.max_tokens, spec.max_model_len)
    num_blocks = blocks_for(max(longest, len(tokens)), spec.block_size)
    if num_blocks > spec.num_blocks:
        raise PromptRefused(f"it may grow to {num_blocks} blocks, the pool has {spec.num_blocks}")
    if prompt.sampling.beams is not None and max_running is not None:
        _check_beams(prompt.sampling.beams, len(tokens), longest, spec, max_running)
    return Sequence(
        key=sequence_key(header),
        tokens=TokenBuffer(tokens),
        num_prompt=len(tokens) - prompt.num_output,
        sampling=prompt.sampling,
        root=root_hash(model=spec.pairing_fingerprint, cache_salt=prompt.cache_salt),
        table=BlockTable(spec.block_size),
        origin=Origin(
            router,
            header.trace,
            prompt.priority,
            prompt.tenant,
            prompt.weight,
            prompt.session,
            prompt.text_owner,
            sample_group=header.request if prompt.num_samples > 1 else "",
        ),
    )


def _check_beams(beams: BeamSpec, num_tokens: int, longest: int, spec: ModelSpec, max_running: int) -> None:
    """Checks that all beams of a search fit at once. Raises PromptRefused."""
    if beams.width > max_running:
        raise PromptRefused(f"{beams.width} beams run at a time, and max_running is {max_running}")
    num_blocks = blocks_for_group(num_tokens, longest, beams.width, spec.block_size)
    if num_blocks > spec.num_blocks:
        raise PromptRefused(
            f"{beams.width} beams may grow to {num_blocks} blocks together, the pool has {spec.num_blocks}"
        )


def pack_candidates(candidates: BeamCandidates) -> PackedCandidates:
    """Returns little-endian int32 token ids and float32 log-probabilities."""
    return PackedCandidates(
        candidates.token_ids.astype("<i4").tobytes(),
        candidates.logprobs.astype("<f4").tobytes(),
    )


def unpack_candidates(packed: PackedCandidates) -> BeamCandidates:
    """Inverts `pack_candidates`. Raises ValueError if the bytes are not such arrays."""
    token_ids = np.frombuffer(packed.token_ids, "<i4").astype(np.int32)
    logprobs = np.frombuffer(packed.logprobs, "<f4").astype(np.float32)
    if len(token_ids) != len(logprobs) or not len(token_ids):
        raise ValueError(f"{len(token_ids)} candidates with {len(logprobs)} log-probabilities")
    return BeamCandidates(token_ids, logprobs)
