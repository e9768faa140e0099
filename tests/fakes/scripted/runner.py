"""A simulated device that samples the answers of a script.

A token of an answer comes only if the simulated K/V encode exactly the prompt and the answer so far. A missing, stale
or misplaced block gives another token, as in `kvrelay.simulated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.simulated.simulated_model import SUM_MASK, Vocabulary, contributions, digest
from kvrelay.simulated.simulated_runner import SimulatedRunner
from kvrelay.step.batch import ModelSpec, RowResult, StepResult, WorkerBatch, WorkerRow
from tests.fakes.scripted.script import Script


@dataclass(frozen=True, slots=True)
class _Line:
    """`simulated[i]`: the token that the device samples behind the prompt and the first i tokens of the answer."""

    num_prompt: int
    answer: list[int]
    simulated: NDArray[np.int64]


class ScriptedRunner(ModelRunner):
    """`device` computes the K/V; the tokens that it samples are replaced."""

    def __init__(
        self,
        device: SimulatedRunner,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        script: Script,
        compiler: GrammarCompiler,
    ) -> None:
        self._device, self._vocabulary, self._tokenizer = device, vocabulary, tokenizer
        self._script, self._compiler = script, compiler
        self._lines: dict[SequenceKey, _Line] = {}

    @property
    def spec(self) -> ModelSpec:
        return self._device.spec

    @property
    def pool_memory(self) -> PoolLike:
        return self._device.pool_memory

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        if key in self._lines:
            return
        prompt = list(token_ids[:num_prompt])
        answer = self._answer(prompt, sampling)
        contributed = contributions(np.array(answer, np.uint64), np.arange(len(answer), dtype=np.uint64) + num_prompt)
        digests = np.cumsum(np.array([digest(prompt), *contributed], np.uint64), dtype=np.uint64)
        draws = self._vocabulary.draws(digests & SUM_MASK, np.zeros(len(digests), np.uint64))
        simulated = self._vocabulary.tokens(draws, np.zeros(len(digests), np.bool_))
        plain = msgspec.structs.replace(
            sampling, temperature=0, ignore_eos=True, min_tokens=0, stop_token_ids=(), grammar=None
        )
        self._device.add_sequence(key, plain, token_ids, num_prompt)
        self._lines[key] = _Line(num_prompt, answer, simulated)

    def drop_sequence(self, key: SequenceKey) -> None:
        self._device.drop_sequence(key)
        self._lines.pop(key, None)

    def execute(self, batch: WorkerBatch) -> StepResult:
        result = self._device.execute(batch)
        rows = [self._spoken(row, given) for row, given in zip(batch.rows, result.rows, strict=True)]
        return replace(result, rows=rows)

    def _answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The tokens of the whole answer. Raises GrammarError if the request's grammar does not allow it."""
        text = self._script.answer(self._tokenizer.decode(prompt, skip_special_tokens=False))
        answer: list[int] = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.spec.eos_token_ids[0]]
        if sampling.grammar is not None:
            matcher = self._compiler.compile(sampling.grammar)
            for index, token_id in enumerate(answer):
                try:
                    matcher.accept([token_id])
                except GrammarError as error:
                    said = self._tokenizer.decode(answer[:index])
                    raise GrammarError(
                        f"the script's answer {text!r} is not allowed behind {said!r}: {error}"
                    ) from None
        return answer

    def _spoken(self, row: WorkerRow, given: RowResult) -> RowResult:
        line = self._lines.get(row.key)
        if line is None or not given.token_ids:
            return given
        assert not row.has_placeholder and not row.num_drafts, "scripted workers run with --overlap off and no drafts"
        index = row.position + len(row.token_ids) - line.num_prompt
        if index >= len(line.answer) or given.token_ids[0] != line.simulated[index]:
            return given  # the K/V are wrong, or the sequence goes on behind the end of the answer
        token_id = line.answer[index]
        logprobs = tuple(msgspec.structs.replace(each, token_id=token_id) for each in given.logprobs)
        return RowResult((token_id,), logprobs, given.prompt_logprobs)
