"""What ranks rebuild from step inputs is the batch that was planned, whatever sequences did before."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvrelay.engine.batch import BeamRow, BlockCopy, SwapCopies, WorkerBatch, WorkerRow
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.step_decoder import StepDecoder
from kvrelay.ranks.step_encoder import StepEncoder
from kvrelay.ranks.step_input import NUM_COLUMNS, OutOfStep, StepInput

BLOCK_SIZE = 4
KEY: SequenceKey = ("request", 0, 0)
tokens_of = st.lists(st.integers(0, 5), min_size=1, max_size=12)
"""Few different tokens, so that what a rank has is often right by chance."""


def over_the_wire(step: StepInput) -> StepInput:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepInput)


RANK_0_ALONE = {"key", "has_placeholder", "jumps"}
"""Fields of a row that change nothing of what other ranks compute."""


def seen(row: WorkerRow) -> dict[str, object]:
    """The oracle: what a rank would have if the row were sent whole. A new field of rows is one of it."""
    fields = msgspec.structs.asdict(row)
    fields |= {"token_ids": row.token_ids.tolist(), "block_ids": row.block_ids.tolist(), "beam": row.beam is not None}
    return {name: value for name, value in fields.items() if name not in RANK_0_ALONE}


def test_every_field_of_a_row_is_carried_or_of_rank_0_alone() -> None:
    """A value that differs from the default in every field, so a field that is not sent changes the row."""
    beam = BeamRow(2, np.arange(4, dtype=np.int32), 1)
    table = BlockTable(BLOCK_SIZE, [5])
    values: dict[str, object] = {
        "key": KEY, "token_ids": np.array([3, 4], np.int32), "position": 2, "block_ids": table.ids, "sample": True,
        "is_prefill": True, "has_placeholder": False, "num_drafts": 1, "jumps": True, "beam": beam, "first_scored": 1,
        "num_scored": 1,
    }  # fmt: skip
    assert set(values) == set(WorkerRow.__struct_fields__), "a new field: give it a value here"
    row = WorkerRow(**values)  # type: ignore[arg-type]
    encoder = StepEncoder()
    encoder.add(KEY, [1, 2, 3, 4])
    [decoded] = StepDecoder().decode(over_the_wire(encoder.encode(WorkerBatch(1, [row])))).rows
    assert seen(decoded) == seen(row)


class Model:
    """A sequence, or a beam of one."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.table = BlockTable(BLOCK_SIZE)


class Mirror(RuleBasedStateMachine):
    """A scheduler that does anything: chunks at any place, tables that are replaced, tokens that change."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = StepEncoder()
        self.decoder = StepDecoder()
        self.sequences: dict[SequenceKey, list[Model]] = {}
        self.num_steps = self.num_added = 0

    @rule(tokens=tokens_of, width=st.sampled_from([1, 1, 2, 3]), again=st.booleans())
    def add(self, tokens: list[int], width: int, again: bool) -> None:
        key = (f"request-{self.num_added}", 0, 0)
        self.num_added += 1
        self.sequences[key] = [Model(tokens) for _ in range(width)]
        for _ in range(1 + again):
            self.encoder.add(key, tokens)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        del self.sequences[key]
        self.encoder.drop(key)
        self.encoder.drop(key)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True, max_size=4))
        rows: list[WorkerRow] = []
        for key in keys:
            models = self.sequences[key]
            rows += [self._row(data, key, model, len(models) > 1) for model in models]
        self._run(data, rows)

    def _row(self, data: st.DataObject, key: SequenceKey, model: Model, is_beam: bool) -> WorkerRow:
        is_prefill, drafts = data.draw(st.booleans()), []
        if is_prefill:
            position = data.draw(st.integers(0, len(model.tokens) - 1))
            tokens = model.tokens[position : position + data.draw(st.integers(1, 6))]
        else:
            new = data.draw(tokens_of)[:3]
            drafts = [] if is_beam else data.draw(st.lists(st.integers(0, 5), max_size=3))
            position = data.draw(st.integers(max(0, len(model.tokens) - 3), len(model.tokens) + 2))
            model.tokens += [0] * (position - len(model.tokens))
            model.tokens[position:] = new
            tokens = [*new, *drafts]
        self._change_table(data, model, position + len(tokens))
        return WorkerRow(
            key=key,
            token_ids=np.array(tokens, np.int32),
            position=position,
            block_ids=model.table.ids,
            sample=data.draw(st.booleans()),
            is_prefill=is_prefill,
            num_drafts=len(drafts),
            num_scored=data.draw(st.integers(0, len(tokens))) if is_prefill else 0,
            beam=BeamRow(2, np.array(model.tokens, np.int32), 1) if is_beam else None,
        )

    @staticmethod
    def _change_table(data: st.DataObject, model: Model, num_tokens: int) -> None:
        table = model.table
        change = data.draw(st.sampled_from(["nothing", "nothing", "replace", "truncate", "new"]))
        if change == "replace" and table.num_blocks:
            table.replace(data.draw(st.integers(0, table.num_blocks - 1)), data.draw(st.integers(0, 99)))
        elif change == "truncate":
            table.truncate(data.draw(st.integers(0, table.num_blocks)))
        elif change == "new":
            table = model.table = BlockTable(BLOCK_SIZE, table.ids.copy())
        missing = -(-num_tokens // BLOCK_SIZE) - table.num_blocks
        if missing > 0:
            table.append(data.draw(st.lists(st.integers(0, 99), min_size=missing, max_size=missing + 1)))

    def _run(self, data: st.DataObject, rows: list[WorkerRow]) -> None:
        pair = st.tuples(st.integers(0, 99), st.integers(0, 99))
        pairs = data.draw(st.tuples(*[st.lists(pair, max_size=2)] * 3))
        out, back = (SwapCopies(*map(tuple, zip(*each, strict=True))) if each else SwapCopies() for each in pairs[1:])
        self.num_steps += 1
        batch = WorkerBatch(self.num_steps, rows, out, back, [BlockCopy(*each) for each in pairs[0]])
        wanted = [seen(row) for row in rows]
        decoded = self.decoder.decode(over_the_wire(self.encoder.encode(batch)))
        assert [seen(row) for row in decoded.rows] == wanted
        assert dataclasses.replace(decoded, rows=()) == dataclasses.replace(batch, rows=())

    def teardown(self) -> None:
        """Nothing of ended sequences is left."""
        for key in list(self.sequences):
            self.encoder.drop(key)
        self.decoder.decode(over_the_wire(self.encoder.encode(WorkerBatch(0, []))))
        assert len(self.decoder) == 0


TestMirror = Mirror.TestCase
TestMirror.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def decoding_row(key: SequenceKey, position: int, table: BlockTable) -> WorkerRow:
    if table.capacity_tokens <= position:
        table.append([position // BLOCK_SIZE])
    return WorkerRow(
        key=key,
        token_ids=np.array([position % 7], np.int32),
        position=position,
        block_ids=table.ids,
        sample=True,
        is_prefill=False,
    )


@given(num_rows=st.integers(1, 8), num_tokens=st.integers(1, 2000))
@settings(max_examples=20, deadline=None)
def test_a_decoding_step_carries_one_token_a_row_and_no_prompt(num_rows: int, num_tokens: int) -> None:
    encoder, prompt = StepEncoder(), list(range(num_tokens))
    keys = [(f"request-{number}", 0, 0) for number in range(num_rows)]
    tables = [BlockTable(BLOCK_SIZE) for _ in keys]
    for key, table in zip(keys, tables, strict=True):
        encoder.add(key, prompt)
        table.append(list(range(-(-num_tokens // BLOCK_SIZE))))
    sizes = []
    for position in range(num_tokens, num_tokens + 3):
        rows = [decoding_row(key, position, table) for key, table in zip(keys, tables, strict=True)]
        step = encoder.encode(WorkerBatch(position, rows))
        sizes.append(len(step.data) // 4)
        assert len(step.admitted) == (num_rows if position == num_tokens else 0)
    assert sizes[0] >= num_rows * num_tokens
    # the columns, a token, and at most one new block
    assert max(sizes[1:]) <= (NUM_COLUMNS + 2) * num_rows


def test_a_prompt_that_is_computed_again_is_not_sent_again() -> None:
    encoder, key, table = StepEncoder(), ("request", 0, 0), BlockTable(BLOCK_SIZE, range(25))
    prompt = np.arange(100, dtype=np.int32)
    encoder.add(key, prompt.tolist())

    def size(tokens: np.ndarray, position: int) -> int:
        row = WorkerRow(key=key, token_ids=tokens, position=position, block_ids=table.ids, sample=True, is_prefill=True)
        return len(encoder.encode(WorkerBatch(1, [row])).data) // 4

    assert size(prompt, 0) == NUM_COLUMNS + 100 + 25
    assert size(prompt, 0) == NUM_COLUMNS
    # An output token that the ranks have not seen yet.
    table.append([25])
    assert size(np.append(prompt[50:], 7).astype(np.int32), 50) == NUM_COLUMNS + 1 + 1


def test_a_batch_with_an_unknown_sequence_changes_nothing() -> None:
    encoder, known, unknown = StepEncoder(), ("known", 0, 0), ("unknown", 0, 0)
    encoder.add(known, [1, 2, 3])
    rows = [decoding_row(known, 3, BlockTable(BLOCK_SIZE, [1])), decoding_row(unknown, 1, BlockTable(BLOCK_SIZE, [2]))]
    with pytest.raises(KeyError, match="unknown"):
        encoder.encode(WorkerBatch(1, rows))
    assert len(encoder.encode(WorkerBatch(1, rows[:1])).admitted) == 1


def test_a_lost_step_is_noticed_with_the_next_one_that_needs_it() -> None:
    encoder, key, table = StepEncoder(), ("request", 0, 0), BlockTable(BLOCK_SIZE)
    encoder.add(key, [1, 2, 3])
    decoder = StepDecoder()
    encoder.encode(WorkerBatch(1, [decoding_row(key, 3, table)]))
    with pytest.raises(OutOfStep, match="sequence 0"):
        decoder.decode(encoder.encode(WorkerBatch(2, [decoding_row(key, 4, table)])))


@given(cut=st.integers(1, 8))
def test_a_step_with_less_data_is_refused(cut: int) -> None:
    encoder, key = StepEncoder(), ("request", 0, 0)
    encoder.add(key, [1, 2, 3])
    step = encoder.encode(WorkerBatch(1, [decoding_row(key, 3, BlockTable(BLOCK_SIZE, [0]))]))
    decoder = StepDecoder()
    with pytest.raises(OutOfStep):
        decoder.decode(msgspec.structs.replace(step, data=step.data[: -4 * cut]))
