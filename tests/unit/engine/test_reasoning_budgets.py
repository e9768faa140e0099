"""Budgets of reasoning, sampled: the output is the same however it is divided among steps and workers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.masks import token_masks
from kvrelay.protocol.sampling import Grammar, ReasoningChannels, ReasoningSpan, Sampling
from tests.thoroughness import examples
from tests.unit.engine.test_token_masks import COMPILER, END, FORCING, SAMPLINGS, jump, key, logits_at, sampler_of


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens are waited for, however slow the machine is."""
    monkeypatch.setattr(token_masks, "PATIENCE_S", 60.0)


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
