"""Draws that are begun, and land when their own copy is there, while others begin and sequences come and go."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from threading import Lock
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.sample import random_sampling
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.engine.sample.pending_tokens import PendingTokens
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from tests.fakes.late_copies import LateCopies
from tests.thoroughness import examples

VOCAB_SIZE = 60
EOS = (58, 59)
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
WIDE = Sampling(temperature=1.5, top_p=0.97, seed=3)  # keeps more tokens than are looked at first
KINDS = (
    GREEDY,
    Sampling(temperature=0, logprobs=2),
    Sampling(temperature=1.0, seed=4),
    WIDE,
    Sampling(temperature=1.2, top_p=0.9, seed=5, logprobs=1),
    Sampling(temperature=1.0, top_k=3, seed=6, logit_bias={4: 2.0}, min_tokens=3),
    Sampling(temperature=0, frequency_penalty=1.5, logprobs=0),
    Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.4, seed=7),
    Sampling(temperature=1.0, allowed_token_ids=(3, 5, 8, 58), bad_words=((5,),), min_tokens=2, seed=8),
    Sampling(temperature=1.0, top_p=0.9, bad_words=((3, 4), (9, 9, 9), (5,)), seed=9),
)


@pytest.fixture(autouse=True)
def few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many rows of a small vocabulary must be drawn again."""
    monkeypatch.setattr(random_sampling, "_BEST", (5, 20))


def key(index: int) -> SequenceKey:
    return (f"request-{index}", 0, index % 3)


def looks_back(sampling: Sampling) -> bool:
    """Whether a draw depends on the tokens before it."""
    penalised = sampling.frequency_penalty > 0 or sampling.repetition_penalty != 1
    return penalised or any(len(word) > 1 for word in sampling.bad_words)


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def sampler_of(*samplings: Sampling, lock: Lock | None = None) -> tuple[Sampler, list[SequenceKey]]:
    """Each has a prompt of two tokens."""
    sampler = Sampler(VOCAB_SIZE, EOS, CPU, lock)
    keys = [key(index) for index in range(len(samplings))]
    for each, sampling in zip(keys, samplings, strict=True):
        sampler.add(each, sampling, [1, 2], 2)
    return sampler, keys


@dataclass(slots=True)
class Known:
    """A sequence as the model of the sampler sees it."""

    sampling: Sampling
    tokens: list[int] = field(default_factory=lambda: [1, 2])


@dataclass(slots=True)
class Begun:
    """A pending draw, and what it is to give."""

    draw: PendingTokens
    keys: list[SequenceKey]
    sequences: list[Known]
    logits: torch.Tensor
    positions: list[int]
    bad: bool


class World:
    """A sampler beside a model in which each row is drawn alone, and waited for at once."""

    def __init__(self) -> None:
        self.sampler = Sampler(VOCAB_SIZE, EOS, CPU)
        self.known: dict[SequenceKey, Known] = {}
        self.pending: list[Begun] = []
        self.seed = 0

    def add(self, index: int, sampling: Sampling) -> None:
        if key(index) not in self.known:
            self.known[key(index)] = Known(sampling)
        self.sampler.add(key(index), sampling, [1, 2], 2)

    def drop(self, index: int) -> None:
        self.known.pop(key(index), None)
        self.sampler.drop(key(index))

    def replace(self, gone: list[int], come: list[tuple[int, Sampling]]) -> None:
        """While draws are pending: slots, keys and counts get other owners, each in an order of its own."""
        for index in gone:
            self.drop(index)
        for index, sampling in come:
            self.add(index, sampling)

    def pending_for(self, sequence: Known) -> list[Begun]:
        return [begun for begun in self.pending if any(each is sequence for each in begun.sequences)]

    def begin(self, chosen: list[int], bad: bool) -> None:
        keys = [key(index) for index in chosen if key(index) in self.known]
        if not keys or len(self.pending) == 2:
            return
        sequences = [self.known[each] for each in keys]
        self.seed += 1
        logits = make_logits(len(keys), self.seed)
        if bad:
            logits[-1, 7] = float("nan")
        positions = [len(each.tokens) + len(self.pending_for(each)) for each in sequences]
        early = any(looks_back(each.sampling) and self.pending_for(each) for each in sequences)
        if early:
            with pytest.raises(RuntimeError, match="have not landed"):
                self.sampler.begin(keys, np.array(positions), logits)
            return
        draw = self.sampler.begin(keys, np.array(positions), logits)
        self.pending.append(Begun(draw, keys, sequences, logits, positions, bad))

    def land(self) -> None:
        if not self.pending:
            return
        begun = self.pending.pop(0)
        if begun.bad:
            with pytest.raises(BadLogits) as caught:
                begun.draw.land()
            assert caught.value.keys == {begun.keys[-1]}
            return
        token_ids, logprobs = begun.draw.land()
        for row, (each, sequence) in enumerate(zip(begun.keys, begun.sequences, strict=True)):
            alone = Sampler(VOCAB_SIZE, EOS, CPU)
            alone.add(each, sequence.sampling, sequence.tokens, 2)
            expected, entries = alone.begin([each], np.array([begun.positions[row]]), begun.logits[row][None]).land()
            assert token_ids[row] == expected[0]
            assert logprobs[row] == entries[0]
        assert (begun.draw.resampled == (begun.draw.token_ids.numpy() != token_ids)).all()
        for sequence, token_id in zip(begun.sequences, token_ids.tolist(), strict=True):
            sequence.tokens.append(token_id)

    def discard(self, index: int) -> None:
        if index < len(self.pending):
            self.pending.pop(index).draw.discard()

    def check(self) -> None:
        keys = list(self.known)
        if not keys:
            return
        on_host, on_device = [], []
        for sequence in self.known.values():
            on_host.append(sequence.tokens[-1] if len(sequence.tokens) > 2 else 0)
            on_device.append(on_host[-1])
            for begun in self.pending_for(sequence):
                row = next(at for at, each in enumerate(begun.sequences) if each is sequence)
                on_device[-1] = int(begun.draw.token_ids[row])
        assert self.sampler.last_sampled(keys).tolist() == on_host
        assert self.sampler.last_on_device(keys).tolist() == on_device
        for begun in self.pending:
            at = [row for row, each in enumerate(begun.keys) if self.known.get(each) is begun.sequences[row]]
            if at:
                order = [keys.index(begun.keys[row]) for row in at]
                last = self.sampler.last_on_device([begun.keys[row] for row in at])
                assert last.tolist() == [on_device[index] for index in order]


indices = st.integers(0, 6)
moves = st.one_of(
    st.tuples(st.just("add"), indices, st.sampled_from(KINDS)),
    st.tuples(st.just("drop"), indices),
    st.tuples(
        st.just("replace"),
        st.lists(indices, min_size=1, max_size=4),
        st.lists(st.tuples(indices, st.sampled_from(KINDS)), min_size=1, max_size=4),
    ),
    st.tuples(st.just("begin"), st.permutations(range(7)).map(lambda order: order[:5]), st.booleans()),
    st.tuples(st.just("begin"), st.just(list(range(7))), st.just(False)),
    st.tuples(st.just("land")),
    st.tuples(st.just("land")),
    st.tuples(st.just("discard"), st.integers(0, 1)),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=7, max_size=7), st.lists(moves, max_size=30))
def test_draws_that_overlap_give_what_each_row_alone_would(
    kinds: list[Sampling], sequence: list[tuple[object, ...]]
) -> None:
    """Whatever begins, lands, is given up, comes and goes meanwhile; and the device knows who drew what last."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        LateCopies(monkeypatch)
        world = World()
        for index, kind in enumerate(kinds):
            world.add(index, kind)
        for name, *arguments in sequence:
            getattr(world, str(name))(*arguments)
            world.check()
        while world.pending:
            world.land()
            world.check()


def test_a_draw_lands_while_a_later_one_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(monkeypatch)
    sampler, keys = sampler_of(GREEDY, WIDE, Sampling(temperature=0, logprobs=1))
    first = sampler.begin(keys, np.full(3, 2), make_logits(3))
    of_first = copies.num_started
    followed = sampler.last_on_device(keys)
    second = sampler.begin(keys, np.full(3, 3), make_logits(3, 1))
    in_second = set(range(of_first, copies.num_started))
    first.land()
    assert not in_second & set(copies.landed)
    assert sampler.last_on_device(keys).tolist() == second.token_ids.tolist()
    assert followed.tolist() == first.token_ids.tolist()
    second.discard()
    assert in_second & set(copies.landed)
    assert sampler.last_on_device(keys).tolist() == sampler.last_sampled(keys).tolist()


def test_rows_that_looked_at_too_few_tokens_are_drawn_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, keys = sampler_of(*[Sampling(temperature=1.5, top_p=0.97, seed=seed, logprobs=2) for seed in range(30)])
    logits = make_logits(30)
    draw = sampler.begin(keys, np.full(30, 2), logits)
    provisional = draw.token_ids.clone().numpy()
    token_ids, entries = draw.land()
    monkeypatch.setattr(random_sampling, "_BEST", (VOCAB_SIZE,))
    expected, expected_entries = (
        sampler_of(*[Sampling(temperature=1.5, top_p=0.97, seed=seed, logprobs=2) for seed in range(30)])[0]
        .begin(keys, np.full(30, 2), logits)
        .land()
    )
    assert token_ids.tolist() == expected.tolist()
    assert entries == expected_entries
    assert draw.resampled.tolist() == (provisional != expected).tolist()
    assert draw.resampled.any() and not draw.resampled.all()
    assert sampler.last_on_device(keys).tolist() == expected.tolist()


def test_the_sampler_says_when_draws_are_too_often_made_again() -> None:
    wide = [Sampling(temperature=1.5, top_p=0.97, seed=seed) for seed in range(10)]
    sampler, keys = sampler_of(GREEDY, *wide)
    assert not sampler.resamples_often

    def draws(some: list[SequenceKey]) -> list[bool]:
        """What it says after each of sixty draws."""
        said = []
        for step in range(60):
            sampler.begin(some, np.full(len(some), 2 + step), make_logits(len(some), step)).land()
            said.append(sampler.resamples_often)
        return said

    assert not any(draws(keys[:1]))
    with_redraws = draws(keys)
    assert not with_redraws[0] and with_redraws[-1], "one is no reason, many are"
    after = draws(keys[:1])
    assert after[0] and not after[-1]


def test_what_was_drawn_stays_known_when_many_more_come() -> None:
    sampler, keys = sampler_of(GREEDY, WIDE)
    draw = sampler.begin(keys, np.full(2, 2), make_logits(2))
    for index in range(2, 300):
        sampler.add(key(index), GREEDY, [1], 1)
    assert sampler.last_on_device([key(250), *keys[::-1]]).tolist() == [0, *draw.token_ids.tolist()[::-1]]
    landed = draw.land()[0].tolist()
    assert sampler.last_on_device([key(250), *keys]).tolist() == [0, *landed]


@pytest.mark.parametrize("ending", ["land", "discard"])
@pytest.mark.parametrize("sampling", [GREEDY, WIDE, Sampling(temperature=1.5, top_p=0.97, logprobs=1)])
def test_nobody_waits_with_the_lock(ending: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, free = Lock(), []
    sampler, keys = sampler_of(*[sampling] * 20, lock=lock)
    copies = LateCopies(monkeypatch, lambda: free.append(not lock.locked()))
    with lock:
        draw = sampler.begin(keys, np.full(20, 2), make_logits(20))
        assert lock.locked() and not free
        getattr(draw, ending)()
        assert lock.locked()
    assert free and all(free)
    assert ending == "discard" or sorted(copies.landed) == list(range(copies.num_started))


def test_a_wait_that_fails_leaves_nothing_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an illegal access, when all that is asked of a GPU gives an error."""
    sampler, keys = sampler_of(GREEDY, Sampling(temperature=0, frequency_penalty=1.0))

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    copies = LateCopies(monkeypatch)
    for ending in ("land", "discard"):
        draw = sampler.begin(keys, np.full(2, 2), make_logits(2))
        copies.on_wait = fail
        with pytest.raises(RuntimeError, match="illegal"):
            getattr(draw, ending)()
        copies.on_wait = lambda: None
        assert sampler.last_on_device(keys).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("samplings", "num_kept"),
    [
        ([GREEDY, Sampling(temperature=0, logprobs=3), Sampling(temperature=0, logit_bias={3: 1.0})], 0),
        ([Sampling(temperature=1.0), Sampling(temperature=1.0, frequency_penalty=1.0), GREEDY], 0),
        ([Sampling(temperature=1.0), WIDE, GREEDY, Sampling(temperature=0, logprobs=1)], 1),
        ([WIDE, WIDE, Sampling(temperature=1.5, top_p=0.9, logprobs=1)], 3 + 1),
    ],
    ids=["greedy", "whole", "one", "logprobs"],
)
def test_a_pending_draw_keeps_vocabularies_of_rows_alone_that_may_be_drawn_again(
    samplings: list[Sampling], num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    LateCopies(monkeypatch)
    sampler, keys = sampler_of(*samplings)
    draw = sampler.begin(keys, np.full(len(keys), 2), make_logits(len(keys)))
    assert num_vocabularies(draw) == num_kept
    draw.land()
    assert num_vocabularies(draw) == 0


def num_vocabularies(root: object) -> int:
    """How many rows of a vocabulary's size the tensors hold that can be reached from here."""
    seen, stack, storages = set(), [root], {}
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        else:
            stack += gc.get_referents(each)
    return sum(size // (VOCAB_SIZE * 4) for size in storages.values())
