"""Sampling under grammars, against matchers that are given each output anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.masks import grammar_state, token_masks
from kvrelay.engine.masks.token_masks import GrammarFailed
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarMatcher, TokenMask
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Grammar, GrammarKind, Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from tests.thoroughness import examples

DEMO = Path(__file__).parents[3] / "models" / "demo"
TOKENIZER_JSON = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
END = 2
COMPILER = LLGuidanceCompiler(TOKENIZER_JSON, VOCAB_SIZE, [END])
NUM_PROMPT = 3
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["b"]}
GRAMMARS = [
    None,
    Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA)),
    Grammar(kind=GrammarKind.REGEX, text=r"[0-9]{1,5}(, [0-9]{1,5})*"),
    Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["yes", "no", "yes, but"])),
]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_p=0.8, seed=7)]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens are waited for, however slow the machine is."""
    monkeypatch.setattr(token_masks, "PATIENCE_S", 60.0)


def key(index: int) -> SequenceKey:
    return (f"request-{index}", 0, 0)


def sampler_of(make: GrammarCompiler | None = COMPILER) -> Sampler:
    lock = Lock()
    lock.acquire()  # as its owner does around each call; it is released while masks are waited for
    return Sampler(VOCAB_SIZE, (END,), torch.device("cpu"), lock, None if make is None else lambda: make)


def logits_at(index: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index * 1000 + position)
    return torch.randn(VOCAB_SIZE, generator=generator) * 4


def allowed(grammar: Grammar, output: list[int]) -> list[int]:
    """What may follow an output, by a matcher that has not seen it grow."""
    matcher, mask = COMPILER.compile(grammar), np.zeros(COMPILER.mask_words, np.int32)
    matcher.accept(output)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


def run(rows: list[tuple[Grammar | None, Sampling]], num_steps: int, *, restart_at: int = -1) -> list[list[int]]:
    """The outputs of sequences that are sampled together. `restart_at`: the step at which all come to a new sampler."""
    sampler = sampler_of()
    outputs: list[list[int]] = [[] for _ in rows]

    def add(index: int) -> None:
        grammar, sampling = rows[index]
        wanted = Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed, grammar=grammar)
        sampler.add(key(index), wanted, [*range(4, 4 + NUM_PROMPT), *outputs[index]], NUM_PROMPT)

    for index in range(len(rows)):
        add(index)
    for step in range(num_steps):
        if step == restart_at:
            sampler = sampler_of()
            for index in range(len(rows)):
                add(index)
        live = [index for index in range(len(rows)) if END not in outputs[index]]
        if not live:
            break
        positions = np.array([NUM_PROMPT + len(outputs[index]) for index in live])
        logits = torch.stack([logits_at(index, step) for index in live])
        token_ids, _ = sampler.begin([key(index) for index in live], positions, logits).land()
        for index, token in zip(live, token_ids.tolist(), strict=True):
            outputs[index].append(token)
    return outputs


cases = st.lists(st.tuples(st.sampled_from(GRAMMARS), st.sampled_from(SAMPLINGS)), min_size=1, max_size=5)


@given(rows=cases)
def test_every_token_is_allowed_and_a_greedy_one_is_the_best_of_these(
    rows: list[tuple[Grammar | None, Sampling]],
) -> None:
    for index, output in enumerate(run(rows, 12)):
        grammar, sampling = rows[index]
        if grammar is None:
            continue
        for step, token in enumerate(output):
            candidates = allowed(grammar, output[:step])
            assert token in candidates
            if sampling.temperature == 0.0:
                assert token == max(candidates, key=logits_at(index, step).tolist().__getitem__)


@given(rows=cases, restart_at=st.integers(0, 11))
def test_neither_the_batch_nor_a_new_beginning_changes_an_output(
    rows: list[tuple[Grammar | None, Sampling]], restart_at: int
) -> None:
    together = run(rows, 12)
    assert run(rows, 12, restart_at=restart_at) == together
    alone = run([rows[0]], 12)[0]
    assert alone == together[0]


def test_a_grammar_that_cannot_go_on_fails_its_row_alone() -> None:
    sampler = sampler_of()
    sampler.add(key(0), Sampling(temperature=0.0, grammar=GRAMMARS[3]), [5, 6, 7, 8], 1)  # no choice begins so
    sampler.add(key(1), Sampling(temperature=0.0, grammar=GRAMMARS[3]), [5], 1)
    logits = torch.stack([logits_at(0, 0), logits_at(1, 0)])
    with pytest.raises(GrammarFailed) as failed:
        sampler.begin([key(0), key(1)], np.array([4, 1]), logits).land()
    assert failed.value.keys == {key(0)}
    assert failed.value.kind is FailureKind.GRAMMAR_FAILED and failed.value.kind.recurs
    sampler.drop(key(0))
    assert len(sampler.begin([key(1)], np.array([1]), logits[1:]).land()[0]) == 1


def test_the_compiler_is_made_once_and_before_the_first_request_if_asked() -> None:
    made: list[GrammarCompiler] = []

    def make() -> GrammarCompiler:
        made.append(COMPILER)
        return COMPILER

    sampler = Sampler(VOCAB_SIZE, (END,), torch.device("cpu"), make_compiler=make)
    sampler.prepare_grammars()
    assert len(made) == 1
    sampler.add(key(0), Sampling(temperature=0.0, grammar=GRAMMARS[1]), [5], 1)
    sampler.begin([key(0)], np.array([1]), logits_at(0, 0)[None]).land()
    assert len(made) == 1


def test_without_a_tokenizer_constrained_rows_fail_and_others_do_not() -> None:
    sampler = sampler_of(None)
    sampler.add(key(0), Sampling(temperature=0.0, grammar=GRAMMARS[1]), [5], 1)
    sampler.add(key(1), Sampling(temperature=0.0), [5], 1)
    with pytest.raises(GrammarFailed, match="no tokenizer"):
        sampler.begin([key(0)], np.array([1]), logits_at(0, 0)[None]).land()
    assert len(sampler.begin([key(1)], np.array([1]), logits_at(1, 0)[None]).land()[0]) == 1


class Hanging:
    """A compiler whose masks for one grammar hang until `go_on` is set."""

    def __init__(self, victim: Grammar) -> None:
        self.go_on = Event()
        self.mask_words = COMPILER.mask_words
        self._victim = victim
        self.forced_hang = False

    def knows(self, grammar: Grammar) -> bool:
        return COMPILER.knows(grammar)

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        matcher = COMPILER.compile(grammar)
        return HangingMatcher(matcher, self) if grammar == self._victim else matcher


class HangingMatcher:
    allows_all = False

    def __init__(self, matcher: GrammarMatcher, owner: Hanging) -> None:
        self._matcher = matcher
        self._owner = owner
        self._num_masks = self._num_forced = 0

    def copy(self) -> GrammarMatcher:
        return HangingMatcher(self._matcher.copy(), self._owner)

    def accept(self, token_ids: Sequence[int]) -> None:
        self._matcher.accept(token_ids)

    def forced(self) -> Sequence[int]:
        self._num_forced += 1
        if self._owner.forced_hang:
            assert self._owner.go_on.wait(60)
        return self._matcher.forced()

    def fill(self, mask: TokenMask) -> None:
        self._num_masks += 1
        if self._num_masks > 1:
            assert self._owner.go_on.wait(60)
        self._matcher.fill(mask)


def test_a_mask_that_hangs_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "LONGEST_WAIT_S", 0.2)
    victim, other = GRAMMARS[1], GRAMMARS[2]
    assert victim is not None
    compiler = Hanging(victim)
    sampler = sampler_of(compiler)
    for index, grammar in enumerate([victim, other]):
        sampler.add(key(index), Sampling(temperature=0.0, grammar=grammar), [5], 1)
    both, positions = [key(0), key(1)], np.array([1, 1])
    logits = torch.stack([logits_at(0, 0), logits_at(1, 0)])
    sampler.begin(both, positions, logits).land()
    with pytest.raises(GrammarFailed, match="takes longer") as failed:
        sampler.begin(both, positions + 1, logits).land()
    assert failed.value.keys == {key(0)}
    sampler.drop(key(0))
    assert len(sampler.begin([key(1)], positions[1:] + 1, logits[1:]).land()[0]) == 1
    compiler.go_on.set()


def jump(
    rows: Sequence[tuple[Grammar | None, Sampling]], num_steps: int, *, jumps: bool, restart_at: int = -1
) -> list[list[int]]:
    """The outputs with jump-forward. The logits of a position do not depend on the step that reaches it."""
    outputs: list[list[int]] = [[] for _ in rows]
    sampler = sampler_of()
    for step in range(num_steps):
        if step in (0, restart_at):
            sampler = sampler_of()
            for index, (grammar, sampling) in enumerate(rows):
                wanted = msgspec.structs.replace(sampling, grammar=grammar)
                sampler.add(key(index), wanted, [*range(4, 4 + NUM_PROMPT), *outputs[index]], NUM_PROMPT)
        live = [index for index in range(len(rows)) if END not in outputs[index]]
        if not live:
            break
        positions = np.array([NUM_PROMPT + len(outputs[index]) for index in live])
        logits = torch.stack([logits_at(index, len(outputs[index])) for index in live])
        pending = sampler.begin([key(index) for index in live], positions, logits, np.full(len(live), jumps))
        token_ids, _ = pending.land()
        assert jumps or not pending.forced
        for row, index in enumerate(live):
            outputs[index] += [int(token_ids[row]), *pending.forced.get(row, [])]
            assert int(sampler.last_sampled([key(index)])[0]) == outputs[index][-1]
    return outputs


LONG_NAMES = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 6},
        "preferred_colour": {"enum": ["dark red", "dark blue"]},
        "is_available": {"const": "it is always available"},
    },
    "required": ["customer_name", "preferred_colour", "is_available"],
    "additionalProperties": False,
}
CALL = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": LONG_NAMES}, "end": "</call>"}
TAG = {"format": {"type": "triggered_tags", "triggers": ["<ca"], "tags": [CALL]}}
FORCING = [
    Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(LONG_NAMES), whitespace=""),
    Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(LONG_NAMES)),
    Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["an otter swims", "an otter sleeps", "a heron"])),
    Grammar(kind=GrammarKind.REGEX, text=r"Ref: [0-9]{2} of (the|this) book\."),
    Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps(TAG)),
]
forcing = st.lists(st.tuples(st.sampled_from(FORCING), st.sampled_from(SAMPLINGS[:2])), min_size=1, max_size=4)


@settings(max_examples=examples(30))
@given(rows=forcing, restart_at=st.integers(-1, 20))
def test_jumping_gives_the_tokens_of_sampling_each_under_its_mask(
    rows: list[tuple[Grammar, Sampling]], restart_at: int
) -> None:
    """Also if sequences come to another worker with the output that they have by then."""
    jumping, stepwise = jump(rows, 80, jumps=True, restart_at=restart_at), jump(rows, 80, jumps=False)
    for ahead, one_by_one in zip(jumping, stepwise, strict=True):
        assert ahead[: len(one_by_one)] == one_by_one[: len(ahead)]


@pytest.mark.parametrize("grammar", FORCING[:4])
def test_forced_tokens_are_those_of_the_tokenizer(grammar: Grammar) -> None:
    """Behind any output that the grammar allows, a run is what the tokenizer makes of its text."""
    (output,) = jump([(grammar, SAMPLINGS[1])], 80, jumps=True)
    matcher = COMPILER.compile(grammar)
    for token in output[:-1]:
        if run := [token for token in matcher.forced() if token != END]:
            text = TOKENIZER.decode(run, skip_special_tokens=False)
            assert run == TOKENIZER.encode(text, add_special_tokens=False).ids
        matcher.accept([token])
    assert output[-1] == END and matcher.forced() == (END,)
    matcher.accept([END])
    assert not matcher.forced()


def test_nothing_is_forced_in_the_free_text_of_a_structural_tag() -> None:
    matcher = COMPILER.compile(FORCING[4])
    for token in TOKENIZER.encode("Otters <c and <call in free text", add_special_tokens=False).ids[:-4]:
        matcher.accept([token])
        text_so_far_ends_in_trigger = bool(matcher.forced())
        if text_so_far_ends_in_trigger:
            break
    else:
        raise AssertionError("the trigger forces nothing")
    free = COMPILER.compile(FORCING[4])
    for token in TOKENIZER.encode("Otters swim. < ca <b 1 < 2, <c", add_special_tokens=False).ids:
        free.accept([token])
        assert not free.forced()


def test_a_long_run_comes_in_parts() -> None:
    text = "the otter swims in the river. " * 20
    grammar = Grammar(kind=GrammarKind.CHOICE, text=json.dumps([text]))
    (jumping,), (stepwise,) = (
        jump([(grammar, SAMPLINGS[0])], 400, jumps=True),
        jump([(grammar, SAMPLINGS[0])], 400, jumps=False),
    )
    assert jumping == stepwise and TOKENIZER.decode(jumping[:-1]) == text
    assert len(jumping) > 2 * grammar_state.MAX_RUN_TOKENS


def test_a_run_that_hangs_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(token_masks, "PATIENCE_S", 0.2)
    victim, other = FORCING[0], FORCING[2]
    compiler = Hanging(victim)
    compiler.forced_hang = True
    sampler = sampler_of(compiler)
    for index, grammar in enumerate([victim, other]):
        sampler.add(key(index), Sampling(temperature=0.0, grammar=grammar), [5], 1)
    logits, both = torch.stack([logits_at(0, 0), logits_at(1, 0)]), [key(0), key(1)]
    pending = sampler.begin(both, np.array([1, 1]), logits, np.array([True, True]))
    pending.land()
    assert set(pending.forced) <= {1}
    end = np.array([2, 2 + len(pending.forced.get(1, []))])
    with pytest.raises(GrammarFailed, match="takes longer") as failed:
        sampler.begin(both, end, logits).land()
    assert failed.value.keys == {key(0)}
    assert len(sampler.begin([key(1)], end[1:], logits[1:]).land()[0]) == 1
    compiler.go_on.set()


@pytest.mark.parametrize("jumps", [True, False])
def test_tokens_that_were_forced_too_late_follow_behind_the_next_one(
    monkeypatch: pytest.MonkeyPatch, jumps: bool
) -> None:
    """`jumps`: whether the steps behind the late one jump. The output is that of one token a step."""
    (expected,) = jump([(FORCING[3], SAMPLINGS[1])], 40, jumps=False)
    monkeypatch.setattr(token_masks, "PATIENCE_S", 0.0)
    compiler = Hanging(FORCING[3])
    compiler.forced_hang = True
    sampler = sampler_of(compiler)
    sampler.add(key(0), Sampling(temperature=1.0, seed=5, grammar=FORCING[3]), [*range(4, 4 + NUM_PROMPT)], NUM_PROMPT)
    output: list[int] = []
    while END not in output:
        here = logits_at(0, len(output))[None]
        now = jumps or not output
        pending = sampler.begin([key(0)], np.array([NUM_PROMPT + len(output)]), here, np.array([now]))
        token_ids, _ = pending.land()
        assert output or not pending.forced, "the first run is late"
        output += [int(token_ids[0]), *pending.forced.get(0, [])]
        compiler.go_on.set()
        monkeypatch.setattr(token_masks, "PATIENCE_S", 60.0)
    assert output == expected


def test_rows_whose_masks_are_late_are_named_and_others_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, other = GRAMMARS[1], GRAMMARS[2]
    assert victim is not None
    compiler = Hanging(victim)
    sampler = sampler_of(compiler)
    keys = [key(0), key(1), key(2)]
    for one, grammar in zip(keys, [victim, other, None], strict=True):
        sampler.add(one, Sampling(temperature=0.0, grammar=grammar), [5], 1)
    positions, logits = np.array([1, 1, 1]), torch.stack([logits_at(index, 0) for index in range(3)])
    first, _ = sampler.begin(keys, positions, logits).land()
    monkeypatch.setattr(token_masks, "PATIENCE_S", 0.001)
    while (late := sampler.late(keys, 0)).tolist() != [True, False, False]:
        assert late[0], "its mask is not ready"
    again, _ = sampler.begin(keys[1:], positions[1:] + 1, logits[1:]).land()
    assert len(again) == 2
    assert sampler.late(keys[:1], 0).all(), "alone it is waited for, and not for ever"
    compiler.go_on.set()
    (second,), _ = sampler.begin(keys[:1], positions[:1] + 1, logits[:1]).land()
    undisturbed = sampler_of()
    undisturbed.add(key(0), Sampling(temperature=0.0, grammar=victim), [5], 1)
    assert [int(undisturbed.begin(keys[:1], positions[:1] + at, logits[:1]).land()[0][0]) for at in (0, 1)] == [
        first[0],
        second,
    ]


def test_work_for_grammars_is_counted_once() -> None:
    sampler, grammar = sampler_of(), FORCING[2]
    sampler.add(key(0), Sampling(temperature=0.0, grammar=grammar), [5], 1)
    first = sampler.begin([key(0)], np.array([1]), logits_at(0, 0)[None], np.array([True]))
    first.land()
    length = 2 + len(first.forced.get(0, []))
    second = sampler.begin([key(0)], np.array([length]), logits_at(0, 1)[None], np.array([True]))
    second.land()
    work = [each.grammar_work for each in (first, second) if each.grammar_work is not None]
    assert sum(each.num_compiled + each.num_found for each in work) == 1
    assert sum(each.num_forced_tokens for each in work) == sum(len(each.forced.get(0, [])) for each in (first, second))
    assert 1 <= sum(each.num_masks for each in work) <= 3
