"""The vectorised sampler against one row written out, what must not depend on the batch, and its random numbers."""

from __future__ import annotations

from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.sample import random_sampling
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.engine.sample.random_sampling import (
    Limits,
    philox,
    sample_from_all,
    sample_from_few,
    sample_from_more,
    uniforms,
)
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.engine.sample.sampler_state import PenaltyCounts
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from tests.fakes.late_copies import LateCopies
from tests.thoroughness import examples
from tests.unit.engine import sampling_oracle

VOCAB_SIZE = 300
EOS = (298, 299)
CPU = torch.device("cpu")


def key(index: int) -> SequenceKey:
    return (f"request-{index}", 0, index % 3)


def make_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample_one(
    sampling: Sampling, logits: torch.Tensor, tokens: list[int] | None = None, num_prompt: int | None = None
) -> tuple[int, TokenLogprobs | None]:
    tokens = [1] if tokens is None else tokens
    sampler = Sampler(logits.shape[-1], EOS, CPU)
    sampler.add(key(0), sampling, tokens, len(tokens) if num_prompt is None else num_prompt)
    token_ids, logprobs = sampler.begin([key(0)], np.array([len(tokens)]), logits[None]).land()
    return int(token_ids[0]), logprobs[0]


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    token, word_token = st.integers(0, VOCAB_SIZE - 1), st.integers(0, 20)
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_p=draw(st.sampled_from([0.05, 0.6, 0.95, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 7, 500])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.3])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
        logit_bias=draw(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2))),
        ignore_eos=draw(st.booleans()),
        allowed_token_ids=tuple(draw(st.lists(st.integers(0, 60), max_size=40) | st.just([*EOS, 7]))),
        bad_words=tuple(
            tuple(word) for word in draw(st.lists(st.lists(word_token, min_size=2, max_size=3), max_size=4))
        ),
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(samplings(), min_size=1, max_size=6), st.integers(0, 2**16))
def test_a_batch_draws_what_each_row_alone_would(batch: list[Sampling], seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    histories = []
    for index, sampling in enumerate(batch):
        tokens = rng.integers(0, 20 if sampling.bad_words else VOCAB_SIZE, 12).tolist()
        num_prompt = int(rng.integers(1, 13))
        sampler.add(key(index), sampling, tokens, num_prompt)
        histories.append((tokens, num_prompt))
    for step in range(4):
        logits = make_logits(len(batch), seed + step)
        positions = np.array([len(tokens) for tokens, _ in histories])
        keys = [key(index) for index in range(len(batch))]
        given, may_overwrite = logits.clone(), step % 2 > 0
        token_ids, _ = sampler.begin(keys, positions, given, may_overwrite=may_overwrite).land()
        assert may_overwrite or torch.equal(given, logits)
        for index, (sampling, (tokens, num_prompt)) in enumerate(zip(batch, histories, strict=True)):
            token = int(token_ids[index])
            _check_row(sampling, keys[index], tokens[:num_prompt], tokens[num_prompt:], logits[index].numpy(), token)
            tokens.append(token)


def _check_row(
    sampling: Sampling, row_key: SequenceKey, prompt: list[int], output: list[int], logits: np.ndarray, token: int
) -> None:
    adjusted = sampling_oracle.adjusted_logits(sampling, prompt, output, logits, EOS)
    if sampling.temperature == 0:
        assert adjusted[token] >= adjusted.max() - 1e-5
        return
    number = uniforms(*(np.array([n], np.uint64) for n in (sampling.seed, row_key[2], len(prompt) + len(output))))
    probabilities = sampling_oracle.kept_probabilities(sampling, adjusted)
    expected, margin = sampling_oracle.draw(probabilities, float(number[0]))
    assert token == expected or (margin < 1e-5 and probabilities[token] > 0)


def test_draws_follow_the_distribution() -> None:
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=11)
    logits = make_logits(1)[0]
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    draws = 6000
    for index in range(draws):
        sampler.add(("same", index, 0), sampling, [1], 1)
    keys = [("same", index, 0) for index in range(draws)]
    token_ids, _ = sampler.begin(keys, np.arange(draws), logits.expand(draws, -1)).land()
    probabilities = sampling_oracle.kept_probabilities(sampling, logits.double().numpy())
    counts = np.bincount(token_ids, minlength=VOCAB_SIZE)
    kept = probabilities > 0
    assert not counts[~kept].any()
    chi_square = ((counts[kept] - draws * probabilities[kept]) ** 2 / (draws * probabilities[kept])).sum()
    assert chi_square < 2.5 * kept.sum()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 12), max_size=5),
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=9), max_size=6),
)
def test_the_counts_of_several_tokens_of_a_row_are_those_of_one_after_the_other(
    prompt: list[int], calls: list[list[tuple[int, int]]]
) -> None:
    together, single = PenaltyCounts(VOCAB_SIZE), PenaltyCounts(VOCAB_SIZE)
    for counts in (together, single):
        assert len({counts.add(prompt, len(prompt)) for _ in range(3)}) == 3
    for call in calls:
        rows, token_ids = (np.array(column, np.int64) for column in zip(*call, strict=True))
        together.append(rows, token_ids)
        for row, token_id in call:
            single.append(np.array([row]), np.array([token_id]))
        for found, expected in zip(together.seen(np.arange(3)), single.seen(np.arange(3)), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_each", [1, 2, 5])
def test_penalties_count_all_tokens_that_a_call_brought_a_sequence(num_each: int) -> None:
    samplings = [Sampling(temperature=1.0, frequency_penalty=0.8, repetition_penalty=1.3, seed=9), Sampling(seed=2)]
    sampler, resumed = Sampler(VOCAB_SIZE, EOS, CPU), Sampler(VOCAB_SIZE, EOS, CPU)
    tokens = [[5, 6] for _ in samplings]
    for index, sampling in enumerate(samplings):
        sampler.add(key(index), sampling, tokens[index], 2)
    for step in range(4):
        keys = [key(index) for index in range(2) for _ in range(num_each)]
        positions = np.array([len(tokens[index]) + each for index in range(2) for each in range(num_each)])
        token_ids, _ = sampler.begin(keys, positions, make_logits(len(keys), step)).land()
        for index, token_id in enumerate(token_ids.tolist()):
            tokens[index // num_each].append(token_id)
        assert sampler.last_sampled([key(0), key(1)]).tolist() == [tokens[0][-1], tokens[1][-1]]
    for index, sampling in enumerate(samplings):
        resumed.add(key(index), sampling, tokens[index], 2)
    at_end = np.array([len(tokens[0]), len(tokens[1])])
    following = [each.begin([key(0), key(1)], at_end, make_logits(2, 99)).land()[0] for each in (sampler, resumed)]
    assert following[0].tolist() == following[1].tolist()


def test_logprobs_are_of_the_model_before_temperature_and_penalties() -> None:
    logits = make_logits(1)[0]
    token, entry = sample_one(Sampling(temperature=2.0, logprobs=3, logit_bias={9: 50.0}, top_k=1), logits)
    expected = torch.log_softmax(logits, -1)
    assert token == 9 and entry is not None
    assert entry.token_id == 9 and entry.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    assert entry.top_ids == expected.topk(3).indices.tolist()
    assert entry.top_logprobs == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)
    _, without_top = sample_one(Sampling(logprobs=0), logits)
    assert without_top is not None and without_top.top_ids == []
    assert sample_one(Sampling(), logits)[1] is None


def test_logprobs_are_of_the_model_though_others_are_adjusted_in_place() -> None:
    logits = make_logits(2)
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    sampler.add(key(0), Sampling(temperature=0.7, logprobs=1, logit_bias={9: 50.0}), [1], 1)
    sampler.add(key(1), Sampling(temperature=0.0, allowed_token_ids=(5,)), [1], 1)
    keys, positions = [key(0), key(1)], np.array([1, 1])
    token_ids, entries = sampler.begin(keys, positions, logits.clone(), may_overwrite=True).land()
    assert token_ids.tolist() == [9, 5] and entries[0] is not None
    assert entries[0].logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[9]), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_their_sequence_and_change_nothing(bad: float, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, frequency_penalty=1.0 if temperature else 0.0)
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    for index in range(3):
        sampler.add(key(index), sampling, [1], 1)
    logits = make_logits(3)
    logits[1, 33] = bad
    keys = [key(index) for index in range(3)]
    with pytest.raises(BadLogits, match="request-1") as caught:
        sampler.begin(keys, np.ones(3, np.int64), logits).land()
    assert caught.value.keys == {key(1)}
    rest = sampler.begin([keys[0], keys[2]], np.ones(2, np.int64), logits[[0, 2]]).land()[0]
    assert rest.tolist() == [sample_one_as(keys[row], sampling, logits[row]) for row in (0, 2)]


def sample_one_as(row_key: SequenceKey, sampling: Sampling, logits: torch.Tensor) -> int:
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    sampler.add(row_key, sampling, [1], 1)
    return int(sampler.begin([row_key], np.ones(1, np.int64), logits[None]).land()[0][0])


def test_slots_are_reused_clean_and_grow() -> None:
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    heavy = Sampling(temperature=0, frequency_penalty=2.0, min_tokens=9, logit_bias={3: 99.0})
    for index in range(200):
        sampler.add(key(index), heavy, [7, 7], 1)
    for index in range(200):
        sampler.drop(key(index))
        sampler.drop(key(index))
    logits = torch.zeros(VOCAB_SIZE)
    logits[[7, 298]] = torch.tensor([1.0, 2.0])
    for index in range(200, 500):
        sampler.add(key(index), Sampling(temperature=0, presence_penalty=0.1 if index % 2 else 0.0), [7], 1)
    keys = [key(index) for index in range(200, 500)]
    assert set(sampler.begin(keys, np.ones(300, np.int64), logits.expand(300, -1)).land()[0].tolist()) == {298}
    assert key(0) not in sampler and key(200) in sampler


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [(Sampling(logit_bias={VOCAB_SIZE: 1.0}), [1]), (Sampling(presence_penalty=1.0), [1, VOCAB_SIZE])],
    ids=["bias", "penalty"],
)
def test_tokens_outside_the_vocabulary_are_refused_before_they_can_spoil_a_step(
    sampling: Sampling, tokens: list[int]
) -> None:
    sampler = Sampler(VOCAB_SIZE, EOS, CPU)
    with pytest.raises(ValueError, match="300"):
        sampler.add(key(0), sampling, tokens, 1)
    assert key(0) not in sampler


def draw_limited(weights: torch.Tensor, limits: Limits, numbers: torch.Tensor) -> torch.Tensor:
    """From few tokens, and from more where those are not enough."""
    token_ids, settled = sample_from_few(weights, limits, numbers)
    left = (~settled).nonzero()[:, 0]
    token_ids[left] = sample_from_more(weights[left], limits.of(left), numbers[left])
    return token_ids


def test_running_sums_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    weights = torch.rand(3, 131_072, generator=torch.Generator().manual_seed(5))
    alone = torch.cat([random_sampling._segments(weights[row : row + 1])[1] for row in range(3)])
    assert torch.equal(random_sampling._segments(weights)[1], alone)


@pytest.mark.parametrize("looked_at", [random_sampling._BEST, random_sampling._BEST_ON_GPU])
@pytest.mark.parametrize(("top_k", "min_p"), [(0, 0.0), (5000, 0.0), (0, 0.9), (900, 0.0), (20, 0.3)])
@pytest.mark.parametrize(("top_p", "spread"), [(0.02, 0.01), (0.9, 0.01), (0.9, 3.0), (0.9999, 0.5), (1.0, 0.1)])
def test_limits_keep_the_same_tokens_however_many_must_be_looked_at(
    top_k: int, min_p: float, top_p: float, spread: float, looked_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_sampling, "_BEST", looked_at)
    logits = make_logits(1, vocab_size=6000) / 3 * spread
    sampling = Sampling(top_k=top_k, min_p=min_p, top_p=top_p)
    weights = torch.exp(logits - logits.amax()).expand(40, -1)
    # From the rounded weights, so that what ties in float32 ties here too.
    probabilities = sampling_oracle.kept_probabilities(sampling, np.log(weights[0].double().numpy()))
    numbers = torch.linspace(0, 0.9999, 40, dtype=torch.float64)
    limits = Limits(torch.full((40,), min_p), torch.full((40,), top_k), torch.full((40,), top_p, dtype=torch.float64))
    drawn = draw_limited(weights, limits, numbers).tolist()
    for token, number in zip(drawn, numbers.tolist(), strict=True):
        expected, margin = sampling_oracle.draw(probabilities, number)
        assert token == expected or margin < 1e-5


def test_draws_at_the_ends_of_the_unit_interval_take_possible_tokens() -> None:
    weights = torch.zeros(2, 1000)
    weights[:, [3, 700]] = torch.tensor([1.0, 0.4])
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_from_all(weights, numbers).tolist() == [3, 700]
    limits = Limits(torch.zeros(2), torch.tensor([700, 2]), torch.ones(2, dtype=torch.float64))
    assert draw_limited(weights, limits, numbers).tolist() == [3, 700]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, frequency_penalty=1.5, logprobs=2),
        Sampling(temperature=1.3, seed=5, repetition_penalty=1.3, presence_penalty=1.0),
        Sampling(temperature=3.0, seed=6, top_p=0.999, logprobs=1),
    ],
)
def test_others_come_and_go_while_the_host_waits_for_the_device(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets the slot of one that left starts from nothing, and those that stay remember what they drew."""
    lock, num_waits = Lock(), 0
    sampler = Sampler(VOCAB_SIZE, EOS, CPU, lock)

    def wait() -> None:
        nonlocal num_waits
        num_waits += 1
        assert lock.acquire(blocking=False), "the lock is held while the host waits"
        sampler.drop(key(1))
        sampler.add(key(7), sampling, [4, 9], 1)
        lock.release()

    others = [Sampler(VOCAB_SIZE, EOS, CPU) for _ in range(2)]
    for index in range(3):
        for each in (sampler, others[0]):
            each.add(key(index), sampling, [3, 5], 2)
    others[1].add(key(7), sampling, [4, 9], 1)
    with lock:
        LateCopies(monkeypatch, wait)
        first, _ = sampler.begin([key(0), key(1), key(2)], np.full(3, 2), make_logits(3)).land()
        monkeypatch.undo()
        assert num_waits and key(1) not in sampler and sampler.last_sampled([key(7)]).tolist() == [0]
        expected, _ = others[0].begin([key(0), key(1), key(2)], np.full(3, 2), make_logits(3)).land()
        assert first.tolist() == expected.tolist()
        assert sampler.last_sampled([key(0), key(2)]).tolist() == expected[[0, 2]].tolist()
        for step in range(3, 8):
            logits = make_logits(3, step)
            logits[:, first] += 4  # what was drawn is likely to come again, unless it is penalised
            stay, _ = sampler.begin([key(0), key(2)], np.full(2, step), logits[:2]).land()
            assert stay.tolist() == others[0].begin([key(0), key(2)], np.full(2, step), logits[:2]).land()[0].tolist()
            new, _ = sampler.begin([key(7)], np.array([step]), logits[2:]).land()
            assert new.tolist() == others[1].begin([key(7)], np.array([step]), logits[2:]).land()[0].tolist()


# -- the random numbers behind the draws -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in (*counter, *key))
    assert [int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))] == expected


def test_each_part_of_the_key_matters() -> None:
    base = np.array([[7, 0, 100], [8, 0, 100], [7, 1, 100], [7, 0, 101], [7 + 2**40, 0, 100]], np.uint64)
    assert len(set(uniforms(*base.T).tolist())) == len(base)


def test_numbers_are_spread_evenly_over_positions() -> None:
    count = 50_000
    same = np.zeros(count, np.uint64)
    numbers = uniforms(same, same, np.arange(count, dtype=np.uint64))
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert numbers.min() >= 0 and numbers.max() < 1


# -- log-probabilities of given tokens, against the definition -------------------------------------------------------


SMALL_VOCAB = 50
token_ids = st.integers(0, SMALL_VOCAB - 1)
scored_samplings = st.builds(
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


@given(rows=st.lists(scored_samplings, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_they_are_the_models_own_and_replace_the_most_likely(rows: list[Sampling], seed: int) -> None:
    sampler = Sampler(SMALL_VOCAB, (49,), torch.device("cpu"))
    for row, sampling in enumerate(rows):
        sampler.add(key_of(row), sampling, [1, 2, 3], 2)
    keys, positions = [key_of(row) for row in range(len(rows))], np.full(len(rows), 3)
    logits = torch.randn(len(rows), SMALL_VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
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
    sampler = Sampler(SMALL_VOCAB, (49,), torch.device("cpu"))
    for logprob_token_ids in ((7, 3), ()):
        sampler.add(key_of(0), Sampling(logprobs=2, logprob_token_ids=logprob_token_ids), [1], 1)
        _, (entry,) = sampler.begin(
            [key_of(0)], np.array([1]), torch.arange(SMALL_VOCAB, dtype=torch.float32)[None]
        ).land()
        assert entry is not None and entry.top_ids == list(logprob_token_ids or (49, 48))
        sampler.drop(key_of(0))


def test_a_token_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="token ids reach"):
        Sampler(SMALL_VOCAB, (49,), torch.device("cpu")).add(
            key_of(0), Sampling(logprob_token_ids=(SMALL_VOCAB,)), [1], 1
        )
