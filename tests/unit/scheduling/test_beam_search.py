"""The search's state against a search that is written as plainly as can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import BeamSpec, FinishReason
from kvrelay.scheduling.beams.beam_search import BeamSearch
from kvrelay.step.batch import BeamCandidates
from tests.fakes.beam_oracle import search
from tests.thoroughness import examples

pytestmark = pytest.mark.unit


def follow(tokens: tuple[int, ...], seed: int, vocabulary: int, count: int, levels: int) -> BeamCandidates:
    """A distribution over a small vocabulary; few `levels` make many ties."""
    rng = np.random.default_rng([seed, *tokens])
    logprobs = -rng.integers(1, levels, vocabulary).astype(np.float32) / np.float32(8)
    best = np.lexsort((np.arange(vocabulary), -logprobs))[:count]
    return BeamCandidates(best.astype(np.int32), logprobs[best])


@settings(max_examples=examples(400), deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([-1.0, 0.0, 0.7, 1.0, 3.0]),
    st.sampled_from([True, False, "never"]),
    st.sets(st.integers(0, 9), max_size=3),
    st.integers(0, 1 << 30),
    st.sampled_from([3, 1000]),
    st.integers(6, 12),
)
def test_equal_to_the_plain_search(
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool,
    ends: set[int],
    seed: int,
    levels: int,
    vocabulary: int,
) -> None:
    spec = BeamSpec(
        width=width, num_returned=max(1, width - 1), length_penalty=length_penalty, early_stopping=early_stopping
    )
    beams = BeamSearch(spec, ends, max_tokens)
    texts: list[tuple[int, ...]] = [()]
    while not beams.is_done:
        assert len(texts) == beams.num_live <= width
        beams.advance([follow(text, seed, vocabulary, beams.num_candidates, levels) for text in texts])
        if not beams.is_done:
            texts = [
                (*texts[parent], token)
                for parent, token in zip(beams.parents.tolist(), beams.tokens.tolist(), strict=True)
            ]
    expected = search(
        spec, ends, max_tokens, lambda tokens: follow(tokens, seed, vocabulary, beams.num_candidates, levels)
    )
    got = beams.results()
    assert [tuple(each.token_ids) for each in got] == [text.token_ids for text in expected]
    assert [each.score for each in got] == pytest.approx([text.score for text in expected], abs=1e-6)
    for each in got:
        assert len(each.token_ids) <= max_tokens
        assert (each.finish is FinishReason.STOP_TOKEN) == (each.token_ids[-1] in ends)
        assert each.finish is FinishReason.STOP_TOKEN or len(each.token_ids) == max_tokens


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    beams = BeamSearch(BeamSpec(width=2, num_returned=2), {0}, 3)
    row = BeamCandidates(np.array([1, 2, 3], np.int32), np.array([-1, -2, -3], np.float32))
    with pytest.raises(ValueError, match="2 rows"):
        beams.advance([row, row])
    with pytest.raises(ValueError, match="empty"):
        beams.advance([BeamCandidates(row.token_ids[:0], row.logprobs[:0])])
    assert beams.num_tokens == 0
    beams.advance([row])
    assert beams.tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="0 tokens"):
        BeamSearch(BeamSpec(width=2, num_returned=2), {0}, 0)
