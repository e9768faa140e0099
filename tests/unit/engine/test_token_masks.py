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

from kvrelay.engine.masks import apply, grammar_state, token_masks
from kvrelay.engine.masks.apply import apply_by_torch, apply_masks
from kvrelay.engine.masks.token_masks import GrammarFailed, NoTokenAllowed
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarMatcher, TokenMask
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay.protocol.sampling import ReasoningChannels, ReasoningSpan, Sampling
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


def test_choices_are_spelled_out_and_end() -> None:
    (output,) = run([(GRAMMARS[3], SAMPLINGS[1])], 40)
    assert output[-1] == END and TOKENIZER.decode(output[:-1]) in ("yes", "no", "yes, but")


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


THINK, THINK_END = 300, 301  # ordinary tokens, so that a model samples them
reasonings = st.builds(
    ReasoningSpan,
    begin_id=st.just(THINK),
    end_id=st.just(THINK_END),
    is_open=st.booleans(),
    token_budget=st.integers(0, 20),
)


@settings(max_examples=examples(30))
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([None, *FORCING]), st.sampled_from(SAMPLINGS[:2]), reasonings), min_size=1, max_size=4
    ),
    restart_at=st.integers(-1, 20),
)
def test_reasoning_ends_behind_its_budget_however_the_output_is_divided(
    rows: list[tuple[Grammar | None, Sampling, ReasoningSpan]], restart_at: int
) -> None:
    """Nothing but the budget ends it: the model finds the marker impossible."""
    never, always = {THINK_END: -1000.0}, {THINK: 1000.0, THINK_END: -1000.0}
    constrained = [
        (grammar, msgspec.structs.replace(sampling, reasoning=span, logit_bias=never if span.is_open else always))
        for grammar, sampling, span in rows
    ]
    jumping = jump(constrained, 60, jumps=True, restart_at=restart_at)
    stepwise = jump(constrained, 60, jumps=False)
    for ahead, one_by_one, (grammar, _, span) in zip(jumping, stepwise, rows, strict=True):
        assert ahead[: len(one_by_one)] == one_by_one[: len(ahead)]
        if grammar is None and END in ahead[: span.token_budget]:
            continue
        end = (span.token_budget or 0) + (not span.is_open)
        assert ahead.index(THINK_END) == end
        if grammar is not None:
            COMPILER.compile(grammar).accept(ahead[end + 1 :])


CHANNEL, MESSAGE, START, STOP, ANALYSIS, FINAL, COMMENTARY, ROLE = range(302, 310)
CLOSING = (STOP, START, ROLE, CHANNEL)


@settings(max_examples=examples(30))
@given(
    budgets=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    sampling=st.sampled_from(SAMPLINGS[:2]),
    restart_at=st.integers(-1, 20),
)
def test_messages_of_reasoning_end_behind_their_budget_however_the_output_is_divided(
    budgets: list[int], sampling: Sampling, restart_at: int
) -> None:
    """The model finds all markers impossible."""
    never = dict.fromkeys((END, CHANNEL, START, STOP), -1000.0)
    rows = []
    for budget in budgets:
        channels = ReasoningChannels(
            channel_id=CHANNEL,
            message_id=MESSAGE,
            start_id=START,
            reasoning_id=ANALYSIS,
            answer_id=FINAL,
            other_ids=(COMMENTARY,),
            closing_ids=CLOSING,
            is_open=True,
            token_budget=budget,
        )
        rows.append((None, msgspec.structs.replace(sampling, reasoning=channels, logit_bias=never)))
    jumping = jump(rows, 40, jumps=True, restart_at=restart_at)
    for ahead, one_by_one, budget in zip(jumping, jump(rows, 40, jumps=False), budgets, strict=True):
        assert ahead[: len(one_by_one)] == one_by_one[: len(ahead)]
        behind = budget + len(CLOSING)
        assert tuple(ahead[budget:behind]) == CLOSING and ahead[behind] in (FINAL, COMMENTARY)


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


def test_penalties_count_forced_tokens() -> None:
    grammar = FORCING[3]
    sampler, again = sampler_of(), sampler_of()
    wanted = Sampling(temperature=0.0, grammar=grammar, presence_penalty=1.5)
    sampler.add(key(0), wanted, [5], 1)
    pending = sampler.begin([key(0)], np.array([1]), logits_at(0, 0)[None], np.array([True]))
    token_ids, _ = pending.land()
    output = [int(token_ids[0]), *pending.forced[0]]
    again.add(key(0), wanted, [5, *output], 1)
    seen = [each._state.counts.seen(np.array([0])) for each in (sampler, again)]
    counts = [dict(zip(ids.tolist(), in_output.tolist(), strict=True)) for _, ids, in_output in seen]
    assert len(output) > 1 and counts[0] == counts[1]


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


@pytest.mark.parametrize("num_before", [0, 1])
def test_no_mask_is_computed_behind_reasoning_without_a_grammar(num_before: int) -> None:
    """`num_before`: tokens that the output has when a worker takes the sequence on."""
    sampler, unconstrained = sampler_of(), sampler_of()
    never = Sampling(temperature=0.0, logit_bias={END: -1000.0})
    span = ReasoningSpan(begin_id=THINK, end_id=THINK_END, is_open=True, token_budget=0)
    output = [THINK_END] * num_before
    sampler.add(key(0), msgspec.structs.replace(never, reasoning=span), [5, *output], 1)
    unconstrained.add(key(0), never, [5, *output], 1)
    num_masks = []
    for step in range(num_before, num_before + 6):
        at, logits = np.array([1 + step]), logits_at(0, step)[None]
        pending = sampler.begin([key(0)], at, logits.clone(), np.array([False]))
        token_ids, _ = pending.land()
        free, _ = unconstrained.begin([key(0)], at, logits).land()
        assert token_ids.tolist() == ([THINK_END] if step == 0 else free.tolist())
        num_masks.append(0 if pending.grammar_work is None else pending.grammar_work.num_masks)
    assert sum(num_masks[:3]) >= 1 and sum(num_masks[3:]) == 0


def test_min_tokens_hold_behind_reasoning_without_a_grammar() -> None:
    span = ReasoningSpan(begin_id=THINK, end_id=THINK_END, is_open=True, token_budget=0)
    ends_soon = Sampling(temperature=0.0, logit_bias={END: 1000.0}, min_tokens=5, reasoning=span)
    (output,) = jump([(None, ends_soon)], 10, jumps=False)
    assert output[0] == THINK_END and output.index(END) == 5


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
