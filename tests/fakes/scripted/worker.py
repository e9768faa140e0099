"""A real worker whose model follows a script: `python -m tests.fakes.scripted.worker prefill|decode FLAGS`.

The script stands in the file KVRELAY_TEST_SCRIPT: a JSON list of rules, of which the first that fits a prompt
determines the answer. Everything but the device is real. The product has no such switch.

A token of an answer comes only if the simulated K/V encode exactly the prompt and the answer so far. A missing, stale
or misplaced block gives another token, as in `kvrelay.simulated`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvrelay.config import WorkerConfig, load_config
from kvrelay.config.worker import Role
from kvrelay.engine.masks.token_masks import make_grammar_compiler
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.process import service_main
from kvrelay.protocol.sampling import Grammar, Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.simulated.simulated_model import SUM_MASK, Vocabulary, contributions, digest, read_facts
from kvrelay.simulated.simulated_runner import SimulatedRunner, make_simulated_runner
from kvrelay.step.batch import ModelSpec, RowResult, StepResult, WorkerBatch, WorkerRow
from kvrelay.worker.shell import run_workers
from kvrelay_decode.__main__ import make_role as make_decode_role
from kvrelay_prefill.__main__ import make_role as make_prefill_role
from tests.fakes.scripted.system import TURN


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
        rule = self._script.rule(self._tokenizer.decode(prompt, skip_special_tokens=False))
        answer = self._tokens(rule.answer)
        if sampling.grammar is not None:
            self._follow(sampling.grammar, answer)
        for text in rule.forbidden:
            if sampling.grammar is None or self._allows(sampling.grammar, self._tokens(text)):
                raise GrammarError(f"the request allows {text!r}, which the script forbids")
        return answer

    def _tokens(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.spec.eos_token_ids[0]]

    def _allows(self, grammar: Grammar, answer: Sequence[int]) -> bool:
        try:
            self._follow(grammar, answer)
        except GrammarError:
            return False
        return True

    def _follow(self, grammar: Grammar, answer: Sequence[int]) -> None:
        """Raises GrammarError if the answer is not allowed."""
        matcher = self._compiler.compile(grammar)
        for index, token_id in enumerate(answer):
            try:
                matcher.accept([token_id])
            except GrammarError as error:
                text, said = self._tokenizer.decode(answer), self._tokenizer.decode(answer[:index])
                raise GrammarError(f"the answer {text!r} is not allowed behind {said!r}: {error}") from None

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


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fits a prompt in whose text each of these expressions is found. `newest`: found behind the last begin of a turn
    of the user or of a tool, so an earlier turn does not count. `forbidden`: answers that the request's grammar must
    not allow."""

    answer: str
    when: tuple[str, ...] = ()
    newest: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def fits(self, prompt: str, newest: str) -> bool:
        return all(re.search(each, prompt) for each in self.when) and all(
            re.search(each, newest) for each in self.newest
        )


NO_RULE = Rule("No rule of the script fits this prompt.")


class Script:
    """`turn`: the text that begins the turns that are answered."""

    def __init__(self, rules: Sequence[Rule], turn: str) -> None:
        self._rules, self._turn = rules, turn

    @classmethod
    def read(cls, path: Path, turn: str) -> Script:
        """Raises msgspec.DecodeError, OSError."""
        return cls(msgspec.json.decode(path.read_bytes(), type=list[Rule]), turn)

    def rule(self, prompt: str) -> Rule:
        newest = prompt[max(0, prompt.rfind(self._turn)) :]
        return next((rule for rule in self._rules if rule.fits(prompt, newest)), NO_RULE)


def make_runner(config: WorkerConfig, *, hands_over: bool = True) -> ScriptedRunner:
    vocabulary = read_facts(config.model).vocabulary
    return ScriptedRunner(
        make_simulated_runner(config),
        vocabulary,
        Tokenizer.from_file(str(Path(config.model) / "tokenizer.json")),
        Script.read(Path(os.environ["KVRELAY_TEST_SCRIPT"]), TURN),
        make_grammar_compiler(config.model, vocabulary.size, vocabulary.eos_ids),
    )


def main(role: Role) -> int:
    return service_main(
        f"scripted {role}",
        f"scripted {role} worker",
        lambda: load_config(WorkerConfig, role=role),
        lambda config: run_workers(config, make_prefill_role if role == "prefill" else make_decode_role, make_runner),
        lambda config: {"worker_id": config.worker_id},
    )


if __name__ == "__main__":
    raise SystemExit(main("prefill" if sys.argv.pop(1) == "prefill" else "decode"))
