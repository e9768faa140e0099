"""The text: fetches Debian's `dict-wn`, reads its entries, and picks the words and glosses the model learns.

Both the choice of words and the choice of gloss are deterministic functions of the package and of `words.txt`.
"""

import gzip
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "dict-wn"
WORD_LIST = Path(__file__).with_name("words.txt")
FUNCTION_WORD_LIST = Path(__file__).with_name("function_words.txt")
MAX_GLOSS_CHARS = 96
MAX_WANTED_GLOSS_CHARS = 170
PARTS_OF_SPEECH = ("n", "adj", "v", "adv")
MIN_GLOSS_CHARS = 8

_SENSE = re.compile(r"^(?:(n|v|adj|adv) )?(\d+): (.*)$")
_EXAMPLE = re.compile(r'[;,:]?\s*"[^"]*"')
_BRACKETS = re.compile(r"\s*(\[[^\]]*\]|\([^()]*\))")
_PLAIN_WORD = re.compile(r"^[a-z]{3,14}$")
_PLAIN_GLOSS = re.compile(r"^[A-Za-z0-9][A-Za-z0-9 ,.'/%-]*$")
_UNWANTED = re.compile(
    r"offensive|obscene|slur|disparag|vulgar|slang|sexual|genital|penis|vagina|prostitut|derogatory|erotic"
    r"|urine|excre|feces|suicide|ethnic"
)
_PASSED_OVER = re.compile(r"Caucasoid|Negroid|Mongoloid")
_INFLECTED = re.compile(r"(ing|ed|ly|[^s]s)$")
_CLAUSE_END = re.compile(r"[;:]|- |--")


@dataclass(frozen=True)
class Entry:
    """A word the model knows: its part of speech (`n`, `v`, `adj`, `adv`) and the one gloss it answers with."""

    word: str
    pos: str
    gloss: str


@dataclass(frozen=True)
class Sense:
    """One numbered sense of a headword, its text as WordNet has it (examples and synonyms included)."""

    pos: str
    text: str


def fetch(work_dir: Path) -> Path:
    """Downloads and unpacks the package with apt (needs no root) and returns the folder it was unpacked into."""
    root = work_dir / PACKAGE
    if not root.exists():
        work_dir.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", PACKAGE], cwd=work_dir, check=True)
        deb = max(work_dir.glob(f"{PACKAGE}_*.deb"))
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    return root


def licence_text(root: Path) -> str:
    """The WordNet licence, out of the package's copyright file (whose other part is about Debian's packaging)."""
    text = (root / "usr/share/doc" / PACKAGE / "copyright").read_text(encoding="utf-8")
    paragraph = text[text.index("Copyright:") : text.index("Files: debian/*")]
    lines = [line.removeprefix(" ") for line in paragraph.strip().splitlines()]
    return "".join(f"{'' if line == '.' else line}\n" for line in lines)


def select_entries(root: Path, num_words: int) -> list[Entry]:
    """The `num_words` entries to learn, by word: those of `words.txt` first, then the most frequent in the glosses."""
    headwords = dict(_read_headwords(root / "usr/share/dictd/wn.dict.dz"))
    frequency: Counter[str] = Counter()
    for senses in headwords.values():
        for sense in senses:
            frequency.update(re.findall(r"[a-z]+", sense.text))
    function_words = set(read_words(FUNCTION_WORD_LIST))
    known = headwords.keys() - function_words
    lemmas = [word for word in frequency if word in known and not _INFLECTED.search(word)]
    by_frequency = sorted(lemmas, key=lambda word: (-frequency[word], word))
    words = read_words(WORD_LIST)
    wanted = [_entry(word, _noun_first(headwords.get(word, [])), MAX_WANTED_GLOSS_CHARS) for word in words]
    frequent = [_entry(word, _most_senses_first(headwords[word]), MAX_GLOSS_CHARS) for word in by_frequency]
    chosen: dict[str, Entry] = {}
    for entry in [*wanted, *frequent]:
        if entry is not None and len(chosen) < num_words:
            chosen.setdefault(entry.word, entry)
    return sorted(chosen.values(), key=lambda entry: entry.word)


def read_words(path: Path) -> list[str]:
    """The words of a committed list, in the file's order, without repeats."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(dict.fromkeys(" ".join(lines).split()))


def _read_headwords(dictionary: Path) -> Iterator[tuple[str, list[Sense]]]:
    """Headwords made of lower-case letters, with their senses. A headword starts its line; its entry is indented."""
    headword, lines = "", list[str]()
    with gzip.open(dictionary, "rt", encoding="utf-8") as text:
        for line in text:
            if line[:1].isspace():
                lines.append(line.strip())
                continue
            if _PLAIN_WORD.match(headword):
                yield headword, _read_senses(lines)
            headword, lines = line.strip(), []
    if _PLAIN_WORD.match(headword):
        yield headword, _read_senses(lines)


def _read_senses(lines: list[str]) -> list[Sense]:
    senses: list[Sense] = []
    pos = ""
    for line in lines:
        found = _SENSE.match(line)
        if found is not None:
            pos = found[1] or pos
            senses.append(Sense(pos, found[3]))
        elif senses:
            gap = "" if senses[-1].text.endswith("-") else " "  # a line is also broken after a hyphen
            senses[-1] = Sense(pos, senses[-1].text + gap + line)
    return senses


def _noun_first(senses: list[Sense]) -> list[Sense]:
    return sorted(senses, key=lambda sense: sense.pos != "n")


def _most_senses_first(senses: list[Sense]) -> list[Sense]:
    """The part of speech with the most senses leads, so that "carry" is not learnt by its one noun."""
    num_senses = Counter(sense.pos for sense in senses)
    return sorted(senses, key=lambda sense: (-num_senses[sense.pos], PARTS_OF_SPEECH.index(sense.pos)))


def _entry(word: str, senses: list[Sense], max_gloss_chars: int) -> Entry | None:
    """The word's first sense that neither explains the word by itself nor sorts people; None if it will not do."""
    for sense in senses:
        gloss = _clean(sense.text)
        if _explains_itself(word, gloss) or _PASSED_OVER.search(gloss):
            continue
        fits = MIN_GLOSS_CHARS <= len(gloss) <= max_gloss_chars and _PLAIN_GLOSS.match(gloss)
        return Entry(word, sense.pos, gloss) if fits and not _UNWANTED.search(sense.text) else None
    return None


def _explains_itself(word: str, gloss: str) -> bool:
    return re.search(rf"\b{word}(s|es|ing|ed)?\b", gloss.lower()) is not None


def _clean(text: str) -> str:
    """The first clause of a sense's definition, without examples, synonyms or asides."""
    text = _EXAMPLE.sub("", text)
    while (stripped := _BRACKETS.sub("", text)) != text:
        text = stripped
    return re.sub(r"\s+", " ", _CLAUSE_END.split(text)[0]).strip(" .,:")
