"""How much of JSON Schema constrained output takes: each schema of the JSON Schema Test Suite, accepted or refused.

For the accepted ones a model of random weights, of which every token that the mask allows is equally likely, writes
answers with jump-forward, as a worker does. Each is valid, wrong, or cut after `MAX_TOKENS`. Wrong answers are listed:
their schemas should have been refused.

The suite is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite, tests/draft2020-12, its files joined
into a list of `{"file": ..., "groups": [...]}`.

Usage: python -m benchmarks.json_schema_suite SUITE.json [--answers 5] [--write FILE.md]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jsonschema import Draft202012Validator

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.grammar_check import MAX_CPU_S, CompilerSpec, GrammarProcess

TOKENIZER_JSON = Path(__file__).resolve().parents[1] / "models" / "demo" / "tokenizer.json"
END = 2
MAX_TOKENS = 300


class RandomModel:
    """Answers by a model for which all allowed tokens are equally likely; an end is ten times as likely."""

    def __init__(self) -> None:
        written = TOKENIZER_JSON.read_text(encoding="utf-8")
        self._tokenizer = tokenizers.Tokenizer.from_str(written)
        size = self._tokenizer.get_vocab_size()
        self._compiler = LLGuidanceCompiler(written, size, [END])
        self._door = GrammarProcess(CompilerSpec(written, size, (END,), MAX_CPU_S))

    def answer(self, schema: Any, seed: int) -> str | None:
        """Returns an answer, or None if it is longer than `MAX_TOKENS`. Raises GrammarError for a refused schema."""
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), whitespace="")
        if refusal := self._door.verdict(grammar).refusal:
            raise GrammarError(refusal)
        matcher = self._compiler.compile(grammar)
        mask, rng = np.zeros(self._compiler.mask_words, np.int32), random.Random(seed)
        output: list[int] = []
        while len(output) < MAX_TOKENS:
            run = list(matcher.forced())
            if not run:
                matcher.fill(mask)
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
                run = [END if END in allowed and rng.random() < 10 / (9 + len(allowed)) else rng.choice(allowed)]
            matcher.accept(run)
            output += run
            if output[-1] == END:
                return str(self._tokenizer.decode(output[:-1], skip_special_tokens=False))
        return None

    def close(self) -> None:
        self._door.close()


def verdict(schema: Any, answer: str | None) -> str:
    """Returns `valid`, `cut`, `wrong`, or `unknown` if the validator cannot resolve a reference of the schema."""
    if answer is None:
        return "cut"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)  # floats are no multiples of 0.0001
    try:
        return "valid" if Draft202012Validator(exact).is_valid(json.loads(answer, parse_float=Decimal)) else "wrong"
    except ValueError:
        return "wrong"
    except Exception as error:  # `referencing` has no common class for references that it does not find
        if "Unresolvable" in type(error).__name__ or "Unresolvable" in str(error):
            return "unknown"
        raise


def kind_of(reason: str) -> str:
    """The refusal without what is particular to its schema."""
    return re.sub(r"\s+", " ", re.sub(r"(\"[^\"]*\"|'[^']*'|`[^`]*`|\d+)", "..", reason.partition("\n")[0]))[:110]


def check(suite: list[dict[str, Any]], num_answers: int) -> list[str]:
    """Returns the lines of the report."""
    model, refusals, verdicts, wrong = RandomModel(), Counter[str](), Counter[str](), list[str]()
    num_accepted = num_schemas = 0
    for file in suite:
        for group in file["groups"]:
            num_schemas += 1
            try:
                answers = [model.answer(group["schema"], seed) for seed in range(num_answers)]
            except GrammarError as error:
                refusals[kind_of(str(error))] += 1
                continue
            num_accepted += 1
            found = [verdict(group["schema"], answer) for answer in answers]
            verdicts.update(found)
            if "wrong" in found:
                wrong.append(f"| {file['file']} | {group['description']} | {found.count('wrong')} of {num_answers} |")
    model.close()
    share = num_accepted / num_schemas
    counted = ", ".join(f"{count} {name}" for name, count in verdicts.items())
    return [
        f"{num_schemas} schemas: {num_accepted} accepted ({share:.0%}), {num_schemas - num_accepted} refused with a "
        f"reason. Answers to accepted ones, {num_answers} each: {counted}.",
        "",
        "| refused because | schemas |",
        "|---|---:|",
        *(f"| {reason} | {count} |" for reason, count in refusals.most_common()),
        "",
        "| file | accepted schema | wrong answers |",
        "|---|---|---:|",
        *wrong,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--answers", type=int, default=5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if not arguments.suite.is_file():
        print(f"skipped: there is no {arguments.suite}; join the files of the JSON Schema Test Suite, see --help")
        return
    suite = json.loads(arguments.suite.read_text(encoding="utf-8"))
    lines = ["# JSON Schema Test Suite", "", *check(suite, arguments.answers)]
    written = "\n".join(lines) + "\n"
    print(written)
    if arguments.write:
        arguments.write.write_text(written)


if __name__ == "__main__":
    main()
