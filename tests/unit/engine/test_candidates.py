"""Candidates of a batch of beams against one row written out."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.sample.candidates import best_candidates
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.step.batch import CandidatesWanted
from tests.thoroughness import examples
from tests.unit.engine import sampling_oracle
from tests.unit.engine.test_sampler import CPU, EOS, VOCAB_SIZE, key, make_logits, samplings

tokens = st.lists(st.integers(0, 20), min_size=1, max_size=12)
rows = st.lists(st.tuples(st.integers(0, 2), tokens, tokens, st.sampled_from([1, 4, 9, 400])), min_size=1, max_size=6)


def without_limits(sampling: Sampling) -> Sampling:
    """Beams with `allowed_token_ids` or `bad_words` are refused."""
    return msgspec.structs.replace(sampling, allowed_token_ids=(), bad_words=())


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(samplings().map(without_limits), min_size=3, max_size=3), rows, st.integers(0, 99))
def test_a_batch_of_beams_against_rows_written_out(
    wanted: list[Sampling], given_rows: list[tuple[int, list[int], list[int], int]], seed: int
) -> None:
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    prompts: dict[int, list[int]] = {}
    for request, prompt, _, _ in given_rows:
        prompts.setdefault(request, prompt)
    for request, prompt in prompts.items():
        spec = BeamSpec(width=4, num_returned=4)
        with_beams = {name: getattr(wanted[request], name) for name in Sampling.__struct_fields__} | {"beams": spec}
        sampler.add(key(request), Sampling(**with_beams), prompt, len(prompt))
    logits = make_logits(len(given_rows), seed)
    beams, positions = [], []
    for request, _, output, count in given_rows:
        history = np.array([*prompts[request], *output], np.int32)
        beams.append(CandidatesWanted(count, history, len(prompts[request])))
        positions.append(len(history))
    found = best_candidates(sampler, [key(r) for r, _, _, _ in given_rows], beams, np.array(positions), logits)
    for row, (request, _, output, count) in enumerate(given_rows):
        logprobs = torch.log_softmax(logits[row], dim=-1).numpy()
        expected = sampling_oracle.adjusted_logits(wanted[request], prompts[request], output, logprobs, EOS)
        got = found[row]
        assert len(got.token_ids) == min(count, int(np.isfinite(expected).sum()))
        assert len(set(got.token_ids.tolist())) == len(got.token_ids)
        assert (np.diff(got.logprobs) <= 0).all()
        np.testing.assert_allclose(got.logprobs, expected[got.token_ids], atol=1e-4)
        np.testing.assert_allclose(got.logprobs, np.sort(expected)[::-1][: len(got.token_ids)], atol=1e-4)


def test_rows_that_are_not_finite_are_named() -> None:
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    beam = CandidatesWanted(2, np.array([1], np.int32), 1)
    for index in range(2):
        sampler.add(key(index), Sampling(beams=BeamSpec(width=1, num_returned=1)), [1], 1)
    logits = make_logits(2)
    logits[1, 5] = float("nan")
    with pytest.raises(BadLogits) as caught:
        best_candidates(sampler, [key(0), key(1)], [beam, beam], np.array([1, 1]), logits)
    assert caught.value.keys == {key(1)}
