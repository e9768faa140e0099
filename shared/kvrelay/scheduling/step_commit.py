"""Commit of a step: appends new tokens, publishes computed blocks, and ends sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import FinishReason
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.plan import PlannedRow, SequenceOutput
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.step.batch import RowResult


class StepCommit:
    """Commits the rows of steps to the sequences of one scheduler."""

    def __init__(self, lifecycle: SequenceLifecycle) -> None:
        self._lifecycle = lifecycle
        self._block_size = lifecycle.blocks.pool.block_size
        self._forked: dict[Sequence, None] = {}  # leaders of the forks of which rows were committed in this step

    def commit_rows(self, rows: Seq[PlannedRow], results: Seq[RowResult]) -> list[SequenceOutput]:
        """Appends each row's new tokens, up to the first one that ends its sequence. Finished sequences have left.

        The KV of all new tokens but the last, and those that a grammar forced, is computed, see `RowResult`.
        """
        outputs: list[SequenceOutput] = []
        lifecycle, block_size = self._lifecycle, self._block_size
        computing, finished = BlockState.COMPUTING, SequenceState.FINISHED
        forced, tails = lifecycle.forced, lifecycle.blocks.tails
        for row, given in zip(rows, results, strict=True):
            sequence = row.sequence
            if sequence.forks is not None:
                self._commit_fork(row, given)
                continue
            # `SequenceLifecycle.row_ended` without the call, which would be 5% of the whole commit.
            sequence.num_planned -= row.num_tokens
            sequence.num_expected -= row.sample
            if sequence in forced.unsettled:
                forced.row_ended(row)
            if sequence.state is finished:
                lifecycle.free_ended(sequence)
                continue
            tokens = sequence.tokens
            # The last token of a late row is computed again, with the mask that it waits for.
            num_computed = sequence.num_computed = sequence.num_computed + row.num_tokens - given.is_late
            if sequence.abort_requested:
                lifecycle.leave(sequence)
                continue
            # Not `row.is_prefill`: the last token of a resumed prompt, alone in its step, looks like a decode.
            prefilled = sequence.block_state is computing and num_computed >= tokens.num_tokens - sequence.num_unneeded
            token_ids, logprobs, finish = given.token_ids, given.logprobs, None
            start = end = tokens.num_tokens
            for token_id in token_ids:
                end = tokens.append(token_id)
                if token_id in sequence.stop_tokens or end >= sequence.max_length:
                    finish = FinishReason.STOP_TOKEN if token_id in sequence.stop_tokens else FinishReason.LENGTH
                    token_ids, logprobs = token_ids[: end - start], logprobs[: end - start]
                    break
            if row.guesses is not None and not given.is_late:
                lifecycle.speculator.verified(sequence, len(row.guesses), given.num_accepted)
            if (num_new := end - start) > 1 or given.is_late:
                num_computed = self._brought_other_than_one(sequence, num_new, given)
            if num_computed - sequence.num_published * block_size >= block_size or sequence in tails.computing:
                lifecycle.publish(sequence)
            if prefilled:
                finish = self._prefilled(sequence, finish)
            if finish:
                lifecycle.leave(sequence)
            scores = given.prompt_logprobs
            if token_ids or scores or prefilled:
                index = start - sequence.num_prompt
                outputs.append(SequenceOutput(sequence, index, token_ids, logprobs, scores, finish, prefilled))
        forked, self._forked = self._forked, {}
        return outputs + [output for leader in forked if (output := self.advance_forks(leader)) is not None]

    def _brought_other_than_one(self, sequence: Sequence, num_new: int, given: RowResult) -> int:
        """A row brought several tokens, or none as its mask was late. Returns how many tokens have KV."""
        forced = self._lifecycle.forced
        if given.is_late:
            forced.was_late(sequence)
        else:
            # The KV of forced tokens, and of the token before them, is computed by the next rows.
            sequence.num_computed += min(num_new, len(given.token_ids) - given.num_forced) - 1
            forced.brought_several(sequence)
        return sequence.num_computed

    def _commit_fork(self, row: PlannedRow, given: RowResult) -> None:
        """Forks end only in `advance_forks`, which follows when all rows of the step are committed, so the sequence is
        always there."""
        assert row.sequence.forks is not None
        self._forked[row.sequence.forks.leader] = None
        self._lifecycle.row_ended(row)
        row.sequence.num_computed += row.num_tokens
        if given.candidates is not None:
            self._lifecycle.forks.offer(row.sequence, given.candidates)

    def advance_forks(self, leader: Sequence) -> SequenceOutput | None:
        """A sequence and its forks go on, if all of them have what they wait for. Returns their output, if any."""
        lifecycle = self._lifecycle
        if leader.abort_requested:
            lifecycle.leave(leader)
            return None
        assert leader.forks is not None
        if not leader.forks.are_parted:
            lifecycle.publish(leader)  # forks publish nothing: one that no other follows is not worth caching
        output = lifecycle.forks.advance(leader)
        if output is not None and output.finish is not None:
            lifecycle.leave(leader)
        return output

    def _prefilled(self, sequence: Sequence, finish: FinishReason | None) -> FinishReason | None:
        """Called when the KV of the whole prompt is computed. Returns why the sequence ends, or None."""
        if finish is None and not sequence.wants_token:
            return FinishReason.LENGTH
        if finish is None and not sequence.prefill_only:
            self._lifecycle.blocks.change_block_state(sequence, BlockState.RUNNING)
        return finish
