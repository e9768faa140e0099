"""Rank 0's side of the mirrored sequence state: turns batches into step inputs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.engine.batch import WorkerBatch, WorkerRow
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.step_input import (
    IS_BEAM,
    IS_PREFILL,
    NUM_COLUMNS,
    SAMPLES,
    Columns,
    Int32Array,
    MirroredSequence,
    StepInput,
)

_NO_TOKENS = np.empty(0, np.int32)


class _Known:
    """A sequence that was added. `rows`: its mirrored state from its first row on; for a beam search one for each beam,
    in the order of a step's rows."""

    __slots__ = ("rows", "tokens")

    def __init__(self, tokens: Int32Array) -> None:
        self.tokens = tokens
        self.rows: list[_Sent] = []


class _Sent(MirroredSequence):
    """The mirrored state, with its table also as bytes, which compare ten times as fast as short arrays."""

    __slots__ = ("raw_table",)

    def __init__(self, number: int, tokens: Int32Array) -> None:
        super().__init__(number, tokens)
        self.raw_table = b""


class StepEncoder:
    """Knows what the ranks have. Every `StepInput` must reach every rank, in order.

    `add` and `drop` cost the ranks nothing: a sequence travels with its first row, and its end with the next step.
    """

    def __init__(self) -> None:
        self._known: dict[SequenceKey, _Known] = {}
        self._free: list[int] = []
        self._num_numbers = 0
        self._dropped: list[int] = []

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._known

    def add(self, key: SequenceKey, token_ids: Sequence[int]) -> None:
        """Adds a sequence with its tokens. Idempotent per key."""
        if key not in self._known:
            self._known[key] = _Known(np.array(token_ids, np.int32))

    def drop(self, key: SequenceKey) -> None:
        """Drops a sequence, which must have no row in a later step. Unknown keys are ignored."""
        known = self._known.pop(key, None)
        if known is not None:
            self._dropped += [sent.number for sent in known.rows]

    def encode(self, batch: WorkerBatch) -> StepInput:
        """Returns what the ranks need for a step. No row has a placeholder.

        Raises KeyError, and changes nothing, for a row whose sequence was not added.
        """
        unknown = [row.key for row in batch.rows if row.key not in self._known]
        if unknown:
            raise KeyError(f"sequences never added, or dropped before the step: {unknown}")
        dropped, self._dropped = self._dropped, []
        self._free += dropped
        rows = _Rows()
        beams: dict[SequenceKey, int] = {}
        for row in batch.rows:
            assert not row.has_placeholder, "rank 0 knows all tokens of a step that it publishes"
            place = 0
            if row.beam is not None:
                place = beams.get(row.key, 0)
                beams[row.key] = place + 1
            rows.add(row, self._sent_for(row, place, rows))
        return rows.finish(batch, dropped)

    def _sent_for(self, row: WorkerRow, place: int, rows: _Rows) -> _Sent:
        known = self._known[row.key]
        if place < len(known.rows):
            return known.rows[place]
        # The other beams are at different tokens anyway, of which the first step sends those that it computes.
        tokens, known.tokens = known.tokens, _NO_TOKENS
        number = self._free.pop() if self._free else self._num_numbers
        self._num_numbers = max(self._num_numbers, number + 1)
        sent = _Sent(number, tokens)
        known.rows.append(sent)
        rows.admit(number, tokens)
        return sent


class _Rows:
    """The parts of a step input, as they are collected."""

    def __init__(self) -> None:
        self._admitted: list[tuple[int, int]] = []
        self._columns = Columns(*([] for _ in range(NUM_COLUMNS)))
        self._tokens: list[Int32Array] = []  # tokens of admissions
        self._new_tokens: list[Int32Array] = []
        self._new_blocks: list[Int32Array] = []

    def admit(self, number: int, tokens: Int32Array) -> None:
        self._admitted.append((number, len(tokens)))
        self._tokens.append(tokens)

    def add(self, row: WorkerRow, sent: _Sent) -> None:
        """Adds a row, and brings the mirrored state up to it."""
        columns, num_tokens = self._columns, len(row.token_ids)
        columns.number.append(sent.number)
        columns.position.append(row.position)
        columns.num_tokens.append(num_tokens)
        columns.num_new.append(self._send_tokens(row, sent))
        self._send_table(row, sent)
        columns.num_drafts.append(row.num_drafts)
        columns.first_scored.append(row.first_scored)
        columns.num_scored.append(row.num_scored)
        columns.flags.append(
            SAMPLES * row.sample + IS_PREFILL * row.is_prefill + (IS_BEAM if row.beam is not None else 0)
        )

    def _send_tokens(self, row: WorkerRow, sent: _Sent) -> int:
        tokens, begin = row.token_ids, row.position
        end = begin + len(tokens)
        sent.reserve(end)
        if row.is_prefill:  # tokens of a prompt are mostly there, and those of an output never
            differs = np.flatnonzero(sent.tokens[begin:end] != tokens)
            tokens = tokens[differs[0] :] if len(differs) else _NO_TOKENS
        if len(tokens):
            sent.tokens[end - len(tokens) : end] = tokens
            self._new_tokens.append(tokens)
        return len(tokens)

    def _send_table(self, row: WorkerRow, sent: _Sent) -> None:
        table, columns = row.block_ids, self._columns
        if table is sent.table and not table.flags.writeable:  # the scheduler's views never change
            columns.num_kept.append(len(table))
            columns.num_blocks.append(0)
            return
        raw = table.tobytes()
        if raw.startswith(sent.raw_table):
            num_kept = len(sent.raw_table) // 4
        else:
            shorter = min(len(table), len(sent.raw_table) // 4)
            before = np.frombuffer(sent.raw_table, np.int32, shorter)
            differs = np.flatnonzero(before != table[:shorter])
            num_kept = int(differs[0]) if len(differs) else shorter
        sent.table, sent.raw_table = table, raw
        columns.num_kept.append(num_kept)
        columns.num_blocks.append(len(table) - num_kept)
        if num_kept < len(table):
            self._new_blocks.append(table[num_kept:])

    def finish(self, batch: WorkerBatch, dropped: list[int]) -> StepInput:
        """The step input of all rows that were added, and of the batch's copies."""
        parts = [np.array(self._columns, np.int32).ravel(), *self._tokens, *self._new_tokens, *self._new_blocks]
        for pairs in (
            ([copy.source for copy in batch.copies], [copy.target for copy in batch.copies]),
            batch.swap_out,
            batch.swap_in,
        ):
            parts += [np.array(each, np.int32) for each in pairs if len(each)]
        return StepInput(
            step=batch.step,
            num_rows=len(batch.rows),
            data=np.concatenate(parts).tobytes(),
            dropped=dropped,
            admitted=self._admitted,
            num_copies=len(batch.copies),
            num_out=len(batch.swap_out.blocks),
            num_back=len(batch.swap_in.blocks),
        )
