"""Log-probabilities of given tokens, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey

VOCAB_SIZE = 50
token_ids = st.integers(0, VOCAB_SIZE - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 9),
    logprobs=st.none() | st.integers(0, 4),
    logprob_token_ids=st.lists(token_ids, max_size=6, unique=True).map(tuple),
    presence_penalty=st.sampled_from([0.0, 2.0]),
)


def key_of(row: int) -> SequenceKey:
    return (f"request-{row}", 0, 0)


@given(rows=st.lists(samplings, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_they_are_the_models_own_and_replace_the_most_likely(rows: list[Sampling], seed: int) -> None:
    sampler = Sampler(VOCAB_SIZE, (49,), torch.device("cpu"))
    for row, sampling in enumerate(rows):
        sampler.add(key_of(row), sampling, [1, 2, 3], 2)
    keys, positions = [key_of(row) for row in range(len(rows))], np.full(len(rows), 3)
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    sampled, entries = sampler.begin(keys, positions, logits.clone()).land()
    for row, (sampling, entry) in enumerate(zip(rows, entries, strict=True)):
        if sampling.logprobs is None:
            assert entry is None
            continue
        assert entry is not None and entry.token_id == sampled[row]
        expected = torch.log_softmax(logits[row], dim=-1)
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
        likeliest = expected.argsort(descending=True)[: sampling.logprobs].tolist()
        assert entry.top_ids == (list(sampling.logprob_token_ids) or likeliest)
        assert entry.top_logprobs == pytest.approx(expected[entry.top_ids].tolist(), abs=1e-5)


def test_a_slot_that_is_used_again_wants_nothing() -> None:
    sampler = Sampler(VOCAB_SIZE, (49,), torch.device("cpu"))
    for logprob_token_ids in ((7, 3), ()):
        sampler.add(key_of(0), Sampling(logprobs=2, logprob_token_ids=logprob_token_ids), [1], 1)
        _, (entry,) = sampler.begin(
            [key_of(0)], np.array([1]), torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]
        ).land()
        assert entry is not None and entry.top_ids == list(logprob_token_ids or (49, 48))
        sampler.drop(key_of(0))


def test_a_token_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="token ids reach"):
        Sampler(VOCAB_SIZE, (49,), torch.device("cpu")).add(
            key_of(0), Sampling(logprob_token_ids=(VOCAB_SIZE,)), [1], 1
        )
