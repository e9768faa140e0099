"""Pieces of a text that are remembered give the ids of the whole text, whatever was encoded before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvrelay_router.text import pieces
from kvrelay_router.text.pieces import PieceCache, added_around, piece_cache_of
from kvrelay_router.text.spans import MAX_SEEN, SpanCache
from kvrelay_router.text.tokenizer import Tokenizer as RouterTokenizer
from tests.fakes.text_model import CORPUS, SPECIAL, byte_fallback_tokenizer, byte_level_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MORE_CORPUS = ["it's you're we'll I'd 1 12 123 1234 12345", "a\n\n b \n  c\t d  e   f", "x = {'a': 1}  # so\n    y()\n"]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _on_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Which sees letters that stand for bytes, and no space."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), split])


def _byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *added: AddedToken,
    normalizer: normalizers.Normalizer | None = None,
    dropout: float | None = None,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(dropout=dropout))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS + MORE_CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
WORDS_ADDED = [AddedToken("<tool>"), AddedToken(" otter"), AddedToken("[INST]"), AddedToken("\u0301!")]
SOUND = {
    "gpt2": _byte_level(GPT2),
    "digits": _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])),
    "llama3": _byte_level(_split(LLAMA3)),
    "qwen": _byte_level(_split(QWEN), *WORDS_ADDED, normalizer=normalizers.NFC()),
    "gpt4o": _byte_level(_split(GPT4O), *WORDS_ADDED),
}


def _whole(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


def _memory(tokenizer: Tokenizer, capacity: int = pieces.MAX_PIECES) -> PieceCache:
    memory = piece_cache_of(tokenizer, capacity)
    assert memory is not None
    return memory


WORDS = ["otter", "Otter's", "it'S", "you're", "12345", "x1y2", "na\u00efve", "e\u0301", "K\u212b", "\u6771\u4eac"]
WORDS += ["\u0301", "\u1100\u1161", "\u200b", "\u180e", "\ufeff", "\U0001f9a6", "--", "...", "'", ".", ",", ";"]
WORDS += ["!)", '"', "/", "{'a':", "\\", "tool>", "<|im_", "end|>", "<|im_end|>", "<|im_start|>", "<|endoftext|>"]
WORDS += ["<tool>", "[INST]", "\u037e"]
SPACES = [" ", " ", " ", " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\xa0", "\u3000", "\x1c", "\x85"]
SPACES += ["\u2028", ""]
TEXTS = st.one_of(
    st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(SPACES)), max_size=40).map("".join),
    st.lists(st.one_of(st.sampled_from(WORDS), st.just(" ")), max_size=60).map("".join),
    st.text(max_size=60),
    st.text(alphabet=" ab1'.\n\u0301<", max_size=60),
)


@pytest.mark.parametrize("kind", SOUND)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), capacity=st.sampled_from([1, 8, 1000]))
@example(texts=["otter  12 otter\n it's", "it's  otter"] * 3, capacity=1000)
@settings(deadline=None)
def test_pieces_give_the_ids_of_the_whole(kind: str, texts: list[str], capacity: int) -> None:
    memory = _memory(SOUND[kind], capacity)
    for text in [*texts, *texts]:
        assert memory.encode(text) == _whole(SOUND[kind], text)
        assert len(memory) <= capacity


@pytest.mark.parametrize("kind", SOUND)
@given(text=TEXTS)
@settings(deadline=None)
def test_each_piece_is_independent_of_the_others(kind: str, text: str) -> None:
    cut = pieces.PIECE.findall(text)
    assert "".join(cut) == text
    assert [i for piece in cut for i in _whole(SOUND[kind], piece)] == _whole(SOUND[kind], text)


@pytest.mark.parametrize("kind", SOUND)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=8),
    capacity=st.sampled_from([1, 4, 1000]),
    max_ids=st.sampled_from([1, 20, 10_000]),
    span_chars=st.sampled_from([1, 5, 16]),
    window_chars=st.sampled_from([2, 20, 50, 10_000]),
)
@settings(deadline=None)
def test_spans_give_the_ids_of_the_whole(
    kind: str, texts: list[str], order: list[int], capacity: int, max_ids: int, span_chars: int, window_chars: int
) -> None:
    """Texts that begin alike are those that were put together of the same ones, in any order."""
    encode = _memory(SOUND[kind]).encode
    memory = SpanCache(encode, capacity=capacity, max_ids=max_ids, span_chars=span_chars, window_chars=window_chars)
    joined = "".join(texts[number % len(texts)] for number in order)
    for text in [*texts, joined, *texts, joined, joined + texts[0], texts[0] + joined, joined]:
        assert memory.encode(text) == _whole(SOUND[kind], text)
        assert len(memory) <= capacity
        assert memory.num_ids <= max_ids


def test_what_begins_as_others_did_is_encoded_from_where_it_parts() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return _whole(SOUND["gpt2"], text)

    memory = SpanCache(encode, span_chars=10)
    beginning = "the otter swims in the river"
    for _ in range(3):
        memory.encode(beginning)
    assert asked == [beginning, "the otter swims", " in the river"]  # the second time, each by itself
    asked.clear()
    longer = beginning + " and the fish flee"
    assert memory.encode(longer) == _whole(SOUND["gpt2"], longer)
    assert asked == [" and the fish flee"]


def test_spans_that_come_once_are_not_kept() -> None:
    memory = SpanCache(_memory(SOUND["gpt2"]).encode, span_chars=4)
    for number in range(100):
        memory.encode(f"the {number} otters have {number} fish")
    assert len(memory) <= 2  # what all of them have
    text = "x" * 100
    for _ in range(3):
        assert memory.encode(text) == _whole(SOUND["gpt2"], text)
    assert len(memory) <= 2  # nothing so long


def test_spans_of_many_ids_make_older_ones_go() -> None:
    """What a client chooses may be a thousand ids a span: as many spans as are remembered would fill the memory."""
    memory = SpanCache(lambda text: [ord(char) for char in text], capacity=1000, max_ids=100, span_chars=10)
    for first in "abcdefghijklmnopqrstuvwxyz":
        for _ in range(2):
            memory.encode(first * 20)
        assert len(memory) * 20 == memory.num_ids <= 100
    assert len(memory) >= 2


def _learned(text: str, window_chars: int) -> list[str]:
    """The spans that are encoded by themselves when a text comes again."""
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [1]

    memory = SpanCache(encode, span_chars=5, window_chars=window_chars)
    for _ in range(2):
        memory.encode(text)
    return [span for span in asked[1:] if len(span) <= 2 * 5]


@given(
    words=st.lists(st.sampled_from([" otter", " o", " y 1", " a--b  ", " " + "x" * 20]), max_size=30),
    window_chars=st.integers(30, 60),  # no span is as long
)
def test_windows_cut_a_text_where_it_would_be_cut_without_them(words: list[str], window_chars: int) -> None:
    assert _learned("".join(words), window_chars) == _learned("".join(words), 10_000)


def test_a_text_is_one_span_from_a_window_without_a_cut_on() -> None:
    assert _learned(" an otter" * 2 + "-" * 30 + " a fish" * 2, 20) == [" an otter"]


def test_as_many_spans_as_there_may_be_leave_room_for_others() -> None:
    memory = SpanCache(lambda text: [len(text)], span_chars=8)
    for number in range(MAX_SEEN + 1):
        memory.encode(str(number))
    memory.encode("otter")
    assert not len(memory)
    memory.encode("otter")
    assert memory.encode("otter") == [5]
    assert len(memory) == 1


def test_what_recurs_is_not_encoded_again() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return _whole(SOUND["gpt2"], text)

    memory = PieceCache(encode, dict(zip(SPECIAL, range(3), strict=True)), 1000)
    text = "<|im_start|>user: " + "the otter swims in the river, and the fish flee. " * 4 + "<|im_end|>"
    expected = _whole(SOUND["gpt2"], text)
    for _ in range(50):  # an eighth of it is learned at a time, as long as most of it is new
        assert memory.encode(text) == expected
    asked.clear()
    assert memory.encode(text) == expected
    assert not asked
    memory.encode(text + " badger <|endoftext|> seal")
    assert asked == [" badger<|im_start|> <|endoftext|><|im_start|> seal"]
    all_three = text + "".join(SPECIAL)
    assert memory.encode(all_three) == _whole(SOUND["gpt2"], all_three)
    assert asked[-1] == all_three


def test_what_stands_between_pieces_may_have_the_id_of_a_part_of_them() -> None:
    tokenizer = _byte_level(GPT2, AddedToken("\u00ac", normalized=False))  # which spells the last byte of a euro sign
    separator = tokenizer.token_to_id("\u00ac")
    assert separator in _whole(tokenizer, "\u20ac")
    memory = PieceCache(lambda text: _whole(tokenizer, text), {"\u00ac": separator}, 1000)
    for text in ["the otter"] * 3 + ["the otter the otter the otter \u20ac otter \u20ac1"]:
        assert memory.encode(text) == _whole(tokenizer, text)


MANY_IDS = "\U0001f9a6" * pieces.MAX_PIECE_IDS


def test_long_texts_and_long_pieces_are_not_remembered() -> None:
    memory = _memory(SOUND["gpt2"])
    for text in ("a " * pieces.MAX_CHARS, "x" * (pieces.MAX_PIECE_CHARS + 1), MANY_IDS):
        assert memory.encode(text) == _whole(SOUND["gpt2"], text)
        assert not len(memory)


@pytest.mark.parametrize("by_spans", [False, True])
def test_threads_share_a_memory(by_spans: bool) -> None:
    """One so small that all of them make it forget all the time."""
    memory, draw = _memory(SOUND["llama3"], 6), Random(3)
    encode = SpanCache(memory.encode, capacity=3, span_chars=12).encode if by_spans else memory.encode
    texts = [" ".join(draw.choices(WORDS, k=12)) for _ in range(200)]
    expected = [_whole(SOUND["llama3"], text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(encode, [*texts, *texts])) == [*expected, *expected]


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("template", ["<|im_start|> $A", "<|im_start|> $A <|endoftext|>", "$A $A"])
def test_the_routers_tokenizer_adds_what_the_models_own_adds(template: str, add_special_tokens: bool) -> None:
    backend = byte_level_tokenizer()
    special = [(token, backend.token_to_id(token)) for token in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer = RouterTokenizer(backend)
    for text in ["", "an otter", "An otter is a mammal. " * 3, "An otter is <|im_end|> a mammal"] * 2:
        expected = _whole(backend, text, add_special_tokens=add_special_tokens)
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected


def _bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _prepending() -> Tokenizer:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_fallback_tokenizer(),
        _prepending(),
        _bert(),
        _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        _byte_level(_split(LLAMA3 + r"|\p{L} \p{L}")),
        _byte_level(_split(r"\p{L}+|\p{N}")),
        _byte_level(GPT2, normalizer=normalizers.NFKC()),
        _byte_level(GPT2, normalizer=normalizers.Strip()),
        _byte_level(GPT2, AddedToken("otter is", normalized=False)),
        _byte_level(GPT2, AddedToken("otter")),
        _byte_level(GPT2, AddedToken("e\u0301")),
        _byte_level(GPT2, AddedToken("   ")),
        _byte_level(GPT2, AddedToken("end ")),
        _byte_level(GPT2, AddedToken("the end.")),
        _byte_level(GPT2, AddedToken("end\u037e")),
        _byte_level(GPT2, AddedToken("<end>", rstrip=True)),
        _byte_level(GPT2, AddedToken("<end>", lstrip=True)),
        _byte_level(GPT2, AddedToken("end", single_word=True)),
        _byte_level(GPT2, dropout=0.1),
        _byte_level(_split(LLAMA3.replace(r"\s+(?!\S)|", ""))),
        _byte_level(_split(LLAMA3.replace(r"\s+(?!\S)|\s+", r"\s+|\s+(?!\S)"))),
        _byte_level(_split(r"\s+|" + LLAMA3)),
        _byte_level(_split(r"\p{N}|\s+(?!\S)|\s+")),  # what nothing matches is cut nowhere
        _byte_level(_on_bytes(LLAMA3)),
        _byte_level(pre_tokenizers.Digits()),
        _byte_level(GPT2, AddedToken("\n \u00e1"), normalizer=normalizers.NFC()),
        _byte_level(GPT2, AddedToken("\n a\u0301", normalized=False), normalizer=normalizers.NFC()),
        _byte_level(GPT2, AddedToken("x<|", normalized=False)),  # nothing can separate pieces
    ],
)
def test_parts_that_are_not_known_to_have_none(tokenizer: Tokenizer) -> None:
    assert piece_cache_of(tokenizer) is None


DEEPSEEK = [
    pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
    pre_tokenizers.Split(Regex("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), "isolated"),
    pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]


def test_a_step_that_is_not_known_before_one_that_is_leaves_none() -> None:
    assert piece_cache_of(_byte_level(pre_tokenizers.Sequence(DEEPSEEK))) is None


def test_what_python_takes_for_no_space_no_other_does() -> None:
    """`PIECE` looks for cuts between characters that are no whitespace."""
    chars = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    split = pre_tokenizers.Split(Regex(r"\s"), "removed")
    kept = {char for text, _ in split.pre_tokenize_str(chars) for char in text}
    assert kept >= {char for char in chars if not char.isspace()}


@pytest.mark.parametrize("template", ["$A", "<|im_start|> $A", "<|im_start|> <|im_end|> $A <|im_end|>"])
@pytest.mark.parametrize("with_byte_level", [False, True])
def test_special_tokens_around_a_text(template: str, with_byte_level: bool) -> None:
    tokenizer = byte_level_tokenizer()
    special = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
    processor = processors.TemplateProcessing(single=template, special_tokens=special)
    both = processors.Sequence([processors.ByteLevel(), processor])
    tokenizer.post_processor = both if with_byte_level else processor
    around = added_around(tokenizer)
    assert around is not None
    before, after = around
    for text in ("", "an otter", "<|im_start|>"):
        assert [*before, *_whole(tokenizer, text), *after] == _whole(tokenizer, text, add_special_tokens=True)


def test_what_a_template_says_twice_is_not_around_it() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    assert added_around(tokenizer) is None
    assert piece_cache_of(tokenizer) is None  # the library says it twice without special tokens, too


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.sampled_from([*" abcAB1.,'\n\té東🦦", "otter", " the", "<tool>", "  ", " X"]), max_size=12).map(
        "".join
    ),
    ending=st.lists(st.sampled_from([*" abA1.\né", "er", " otter", "[INST]"]), max_size=3).map("".join),
    kind=st.sampled_from([*SOUND, "byte fallback"]),
)
def test_a_divided_text_has_the_tokens_of_the_whole(text: str, ending: str, kind: str) -> None:
    backend = SOUND.get(kind) or byte_fallback_tokenizer()
    tokenizer = RouterTokenizer(backend)
    head, tail = tokenizer.divided(text)
    assert head + tail == text
    first = tokenizer.encode(head, add_special_tokens=True) if head else []
    rest = tokenizer.encode(tail + ending, add_special_tokens=not head)
    assert [*first, *rest] == _whole(backend, text + ending, add_special_tokens=True)


def test_texts_are_divided_near_their_end() -> None:
    tokenizer = RouterTokenizer(SOUND["llama3"])
    assert tokenizer.divided("An otter eats fish") == ("An otter eats", " fish")
    assert tokenizer.divided("An otter eats 12. ") == ("An otter", " eats 12. ")
    assert tokenizer.divided(" fish") == ("", " fish")
    assert tokenizer.divided("x" * 5000) == ("", "x" * 5000)
    assert tokenizer.divided("a " * 5000 + "b")[1] == " b"
