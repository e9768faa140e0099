"""Masks of a grammar on logits, and the most likely of the tokens that they leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.masks import apply
from kvrelay.engine.masks.apply import apply_by_torch, apply_masks
from kvrelay.engine.masks.token_masks import NoTokenAllowed
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Grammar, GrammarKind, Sampling
from tests.thoroughness import examples
from tests.unit.engine.test_token_masks import END, GRAMMARS, NUM_PROMPT, TOKENIZER, allowed, logits_at, sampler_of


@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_logits_are_masked_in_place_as_by_unpacked_bits(vocab_size: int, num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [row for row in range(num_rows) if rng.random() < 0.7]
    masks = [
        rng.choice([0, -1, int(rng.integers(-(2**31), 2**31))], -(-vocab_size // 32)).astype(np.int32) for _ in rows
    ]
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size + 3), np.float32))[:, :vocab_size]
    expected = logits.clone()
    for row, mask in zip(rows, masks, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        expected[row][torch.from_numpy(allowed == 0)] = -torch.inf
    by_torch = logits.clone()
    if rows:
        apply_by_torch(by_torch, torch.tensor(rows), torch.from_numpy(np.stack(masks)))
    apply_masks(logits, rows, masks)
    assert torch.equal(logits, expected) and torch.equal(by_torch, expected)


@given(st.integers(1, 1200), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_most_likely_allowed_token_is_that_of_masked_logits(vocab_size: int, num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Few different numbers, so that the best ones tie.
    values = rng.choice([-np.inf, -1.5, 0.0, 2.0, *rng.choice([3.0, np.inf, np.nan], 1)], (num_rows, vocab_size + 3))
    logits = torch.from_numpy(values.astype(np.float32))[:, :vocab_size]
    masks = {
        row: rng.choice([0, -1, int(rng.integers(-(2**31), 2**31))], -(-vocab_size // 32)).astype(np.int32)
        for row in range(num_rows)
        if rng.random() < 0.7
    }
    before = logits.clone()
    found = apply.most_likely(logits, masks)
    assert found is not None
    assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0))
    assert torch.equal(found[1].nan_to_num(9.0), logits.amax(dim=-1).nan_to_num(9.0))
    if masks:
        apply_by_torch(logits, torch.tensor([*masks]), torch.from_numpy(np.stack([*masks.values()])))
    for row in range(num_rows):
        if not logits[row].isnan().any() and logits[row].amax() > -torch.inf:
            assert int(found[0][row]) == int(logits[row].numpy().argmax())


@given(st.integers(1, 1200), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_weights_are_the_same_bits_wherever_their_row_lies(vocab_size: int, num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(10 * rng.standard_normal((num_rows, vocab_size + 3), np.float32))[:, :vocab_size]
    logits[:, 1:][torch.from_numpy(rng.random((num_rows, vocab_size - 1)) < 0.1)] = -torch.inf
    scales = rng.choice([0.01, 1.0, 3.7, 1e30], num_rows).astype(np.float32)
    below = logits.double() - logits.double().amax(dim=-1, keepdim=True)
    exact = (below * torch.from_numpy(scales)[:, None]).exp()
    alone = [logits[row : row + 1].clone() for row in range(num_rows)]
    assert apply.to_weights(logits, scales)
    assert ((logits - exact).abs() <= 1e-5 * exact + 1e-37).all()
    for row, weights in enumerate(alone):
        assert apply.to_weights(weights, scales[row : row + 1])
        assert torch.equal(weights[0], logits[row])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_that_share_the_rows_find_the_same_tokens(threads: int) -> None:
    logits = torch.randn(9, 33_001, generator=torch.Generator().manual_seed(threads))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = apply.most_likely(logits)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert found[0].tolist() == logits.numpy().argmax(axis=-1).tolist()
    assert torch.equal(found[1], logits.amax(dim=-1))


def limited(sampler: Sampler, sampling: Sampling, output: list[int]) -> int:
    """The next token behind an output, by a new sequence."""
    name = (f"limited-{output}", 0, 0)
    sampler.add(name, sampling, [*range(4, 4 + NUM_PROMPT), *output], NUM_PROMPT)
    token_ids, _ = sampler.begin([name], np.array([NUM_PROMPT + len(output)]), logits_at(0, len(output))[None]).land()
    sampler.drop(name)
    return int(token_ids[0])


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), bad=st.lists(st.lists(st.sampled_from("0123456789"), min_size=1, max_size=2)))
def test_bad_words_and_allowed_tokens_narrow_what_a_grammar_allows(seed: int, bad: list[list[str]]) -> None:
    grammar = GRAMMARS[2]
    assert grammar is not None
    ids = {digit: TOKENIZER.encode(digit, add_special_tokens=False).ids[0] for digit in "0123456789"}
    words = tuple(tuple(ids[digit] for digit in word) for word in bad)
    may = {*ids.values(), END, *TOKENIZER.encode(", ", add_special_tokens=False).ids}
    sampling = Sampling(temperature=1.0, seed=seed, grammar=grammar, allowed_token_ids=tuple(may), bad_words=words)
    sampler, output = sampler_of(), list[int]()
    while len(output) < 12 and END not in output:
        left = {token for token in allowed(grammar, output) if token in may}
        left -= {last for *before, last in words if output[len(output) - len(before) :] == before}
        if not left:
            with pytest.raises(NoTokenAllowed) as failed:
                limited(sampler, sampling, output)
            assert failed.value.kind is FailureKind.NO_TOKEN_ALLOWED
            return
        output.append(limited(sampler, sampling, output))
        assert output[-1] in left


@pytest.mark.parametrize("min_tokens", [0, 3, 100])
def test_min_tokens_hold_a_grammar_back_from_its_end_for_as_long_as_it_can_go_on(min_tokens: int) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a{0,5}")
    output: list[int] = []
    a = TOKENIZER.encode("a", add_special_tokens=False).ids[0]
    # The end is by far the most likely token.
    sampling = Sampling(
        temperature=0.0, grammar=grammar, allowed_token_ids=(a, END), logit_bias={END: 100.0}, min_tokens=min_tokens
    )
    sampler = sampler_of()
    while END not in output:
        output.append(limited(sampler, sampling, output))
    assert output == [a] * min(min_tokens, 5) + [END]
