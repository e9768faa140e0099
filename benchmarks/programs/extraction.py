"""Three fields out of one answer, with and without surplus text (API speculation).

The demo model answers "What is a banjo?" with a gloss. The program divides it at " of" and " and": what kind of thing,
of what, and what else. Glosses of this form have the program's constants where the model writes them anyway; in others
the first or the second is missing, so surplus text is of no use.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

from kvrelay_programs import Endpoint, State, assistant, gen, program, user

NUM_WORDS = 24
_FORM = re.compile(r"[^,;]* of [^,;]* and [^,;]*")
HEAD = (
    "| glosses | surplus tokens | calls | prompt tokens | times fewer | output tokens | same text |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


@program
def divided(s: State, word: str) -> None:
    s += user(f"What is {'an' if word[0] in 'aeiou' else 'a'} {word}?")
    fields = gen("kind", 24, stop=" of") + " of" + gen("what", 24, stop=" and") + " and" + gen("more", 24)
    s += assistant(fields)


def lines(endpoint: Endpoint, model: Path, surplus: Sequence[int] = (0, 32, 64)) -> list[str]:
    """A table over words of `glosses.tsv`, which is in the directory of the demo model."""
    rows = [line.split("\t") for line in (model / "glosses.tsv").read_text(encoding="utf-8").splitlines()]
    nouns = [(word, gloss) for word, kind, gloss, *_ in rows if kind == "n"]
    lines = [*HEAD]
    for name, words in (
        ("of this form", [word for word, gloss in nouns if _FORM.fullmatch(gloss)]),
        ("of another form", [word for word, gloss in nouns if " of " not in gloss]),
    ):
        drawn = random.Random(0).sample(words, NUM_WORDS)
        lines += _rows(endpoint, name, [{"word": word} for word in drawn], surplus)
    return lines


def _rows(endpoint: Endpoint, name: str, arguments: list[dict[str, str]], surplus: Sequence[int]) -> list[str]:
    rows: list[str] = []
    texts: list[str] = []
    base = 0
    for num_tokens in surplus:
        states = divided.run_batch(
            arguments, endpoint=endpoint, sampling={"temperature": 0}, surplus_tokens=num_tokens, progress=False
        )
        calls = sum(state.usage.calls for state in states)
        num_prompt = sum(state.usage.prompt_tokens for state in states)
        num_output = sum(state.usage.completion_tokens for state in states)
        found = [state.text() for state in states]
        texts, base = texts or found, base or num_prompt
        same = sum(one == other for one, other in zip(found, texts, strict=True))
        rows.append(
            f"| {name} | {num_tokens or 'none'} | {calls} | {num_prompt} | {base / num_prompt:.2f} | {num_output} "
            f"| {same} of {len(found)} |"
        )
    return rows
