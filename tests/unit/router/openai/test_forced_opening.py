"""Outputs begin with what their grammar forces, if nothing else has a say in these tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import BeamSpec, Grammar, GrammarKind, ReasoningChannels, ReasoningSpan, Sampling
from kvrelay.text.grammar_check import GrammarCheck
from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.openai.planning import opening_of, with_openings
from tests.fakes.random_constraints import CHOICES, REGEXES, random_schema

ROOT = Path(__file__).parents[4]
TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_file(str(ROOT / "models" / "demo" / "tokenizer.json")))
END = max(TOKENIZER.special_ids)
NUM_GRAMMARS = 60
FORCED = [5, 6, 7, 8]
CHANNELS = ReasoningChannels(
    channel_id=1, message_id=2, start_id=3, reasoning_id=4, answer_id=5, closing_ids=(6, 7), token_budget=9
)
ANY_CHOICE = Grammar(kind=GrammarKind.CHOICE, text='["a","b"]')
JUMPING, STEPWISE = ModelLimits(100, 100, jump_forward=True), ModelLimits(100, 100)


def random_grammars() -> list[Grammar]:
    rng = random.Random(16)
    grammars = [Grammar(kind=GrammarKind.REGEX, text=text) for text in REGEXES]
    grammars += [Grammar(kind=GrammarKind.CHOICE, text=json.dumps(rng.sample(CHOICES, count))) for count in (1, 1, 2)]
    while len(grammars) < NUM_GRAMMARS:
        schema = random_schema(rng)
        grammars.append(
            Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), whitespace=rng.choice(["", None]))
        )
    return grammars


async def test_the_router_finds_what_workers_force_first() -> None:
    check = GrammarCheck(TOKENIZER, max_cpu_s=60.0)
    compiler = LLGuidanceCompiler(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, (END,))
    num_tokens = 0
    try:
        for grammar in dict.fromkeys(random_grammars()):
            assert check.opening(grammar) == []
            await check.check(grammar)
            forced = [token_id for token_id in compiler.compile(grammar).forced() if token_id != END]
            assert check.opening(grammar) == forced[:64]
            num_tokens += len(forced)
        with pytest.raises(GrammarError):
            await check.check(Grammar(kind=GrammarKind.REGEX, text="(a"))
        assert check.opening(Grammar(kind=GrammarKind.REGEX, text="(a")) == []
    finally:
        check.close()
    assert num_tokens > NUM_GRAMMARS


@given(st.integers(0, 6), st.frozensets(st.sampled_from([5, 6, 7, 8, 9])))
def test_a_token_behind_the_opening_is_left_to_a_worker(max_tokens: int, stops: frozenset[int]) -> None:
    sampling = Sampling(grammar=ANY_CHOICE, max_tokens=max_tokens, stop_token_ids=tuple(stops))
    opening = opening_of(sampling, FORCED)
    assert list(opening) == FORCED[: len(opening)]
    assert not stops & {*opening} and len(opening) <= max(0, max_tokens - 1)
    if len(opening) < min(max_tokens - 1, len(FORCED)):
        assert FORCED[len(opening)] in stops


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(grammar=ANY_CHOICE, logprobs=0),
        Sampling(grammar=ANY_CHOICE, prompt_logprobs=0),
        Sampling(grammar=ANY_CHOICE, allowed_token_ids=(5, 6)),
        Sampling(grammar=ANY_CHOICE, bad_words=((5, 6),)),
        Sampling(grammar=ANY_CHOICE, reasoning=ReasoningSpan(begin_id=1, end_id=2)),
        Sampling(grammar=ANY_CHOICE, reasoning=CHANNELS),
        Sampling(grammar=ANY_CHOICE, beams=BeamSpec(width=2, num_returned=1)),
    ],
)
def test_others_that_have_a_say_leave_no_opening(sampling: Sampling) -> None:
    assert opening_of(sampling, FORCED) == ()


class Known:
    """What has been checked before."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []

    def opening(self, grammar: Grammar) -> list[int]:
        self.asked.append(grammar)
        return FORCED


def test_all_prompts_of_a_request_get_their_openings_at_once() -> None:
    samplings = [Sampling(grammar=ANY_CHOICE, max_tokens=count) for count in (1, 3, 16)] + [Sampling(max_tokens=16)]
    requests = [GenerateRequest(request_id="r", prompt_ids=[1], sampling=sampling) for sampling in samplings]
    known = Known()
    found = with_openings(requests, JUMPING, known)  # type: ignore[arg-type]
    assert [request.opening for request in found] == [(), (5, 6), (5, 6, 7, 8), ()]
    assert known.asked == [ANY_CHOICE]
    assert with_openings(requests, STEPWISE, known) == requests  # type: ignore[arg-type]
    assert with_openings(requests[3:], JUMPING, known) == requests[3:]  # type: ignore[arg-type]
    assert known.asked == [ANY_CHOICE]
