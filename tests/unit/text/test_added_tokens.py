"""Tokens that stand beside `tokenizer.json` are those that transformers knows, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from kvrelay.text.service import TextService
from kvrelay.text.sources import TokenizerNotFound, load_source
from tests.thoroughness import examples

pytestmark = pytest.mark.unit
TOKENS = ["<s>", "</s>", "<tool>", "<|im_end|>", "<x>"]
TEXTS = ["otter", "<s>an <tool> otter <|im_end|></s>", " <x> <x>y <tool>", "<|im_end|> <s> "]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
NAMES = ["bos_token", "eos_token", "pad_token", "unk_token", "image_token"]


def entry(content: str, flags: list[bool]) -> dict[str, Any]:
    return {"content": content, **dict(zip(FLAGS, flags, strict=True))}


FLAG_LISTS = st.lists(st.booleans(), min_size=len(FLAGS), max_size=len(FLAGS))
NAMED = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TOKENS), max_size=3)
LISTED = st.dictionaries(st.sampled_from(TOKENS), FLAG_LISTS, max_size=4)
MORE = st.one_of(
    st.none(),
    st.lists(st.sampled_from(TOKENS), unique=True, min_size=1, max_size=2).map(
        lambda tokens: {"additional_special_tokens": tokens}
    ),
    st.sampled_from(TOKENS).map(lambda token: {"extra_special_tokens": {"video_token": token}}),
)


def write(folder: Path, present: dict[str, list[bool]], files: dict[str, Any]) -> None:
    """A tokenizer of bytes with these added tokens, and other files beside it."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(**entry(content, flags)) for content, flags in present.items()])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if files.get(name) is not None:
            path.write_text(json.dumps(files[name]))


def assert_as_transformers(folder: Path) -> None:
    ours, theirs = TextService.load(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenizer.encode(text, add_special_tokens=False) == ids
        shown = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.tokenizer.decode(ids, skip_special_tokens=True) == shown
    assert load_source(str(folder)).added_tokens.texts() == theirs.special_tokens_map


@given(present=LISTED, named=NAMED, listed=st.none() | LISTED, more=MORE, names_in_map=st.booleans())
@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_they_are_those_of_transformers(
    present: dict[str, list[bool]],
    named: dict[str, str],
    listed: dict[str, list[bool]] | None,
    more: dict[str, Any] | None,
    names_in_map: bool,
    tmp_path: Path,
) -> None:
    """`listed`: in an `added_tokens_decoder`, with ids that go on where those of the tokenizer end."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(more or {})}
    if listed is not None:
        ids = {content: 256 + index for index, content in enumerate([*present, *(listed.keys() - present.keys())])}
        decoder = {str(ids[content]): entry(content, flags) for content, flags in listed.items()}
        config["added_tokens_decoder"] = decoder
    files = {"tokenizer_config": config, "special_tokens_map": named if names_in_map else None}
    if not names_in_map:
        config.update(named)
    write(tmp_path / "model", present, files)
    assert_as_transformers(tmp_path / "model")


@pytest.mark.parametrize("special", [None, "<tool>"])
def test_a_list_of_texts_and_ids_is_read_where_there_is_no_other(special: str | None, tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": [special] if special else []}
    added = {"<x>": 258, "<tool>": 257, "<s>": 256}
    present = {"<s>": [False, False, False, False, True]}
    write(tmp_path / "model", present, {"tokenizer_config": config, "added_tokens": added})
    assert_as_transformers(tmp_path / "model")
    tokenizer = TextService.load(str(tmp_path / "model")).tokenizer
    assert tokenizer.encode("<x><tool>", add_special_tokens=False) == [258, 257]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": []}},
        {"tokenizer_config": {"added_tokens_decoder": {"7": "<x>", "x": {"content": "<tool>"}}}},
        {"tokenizer_config": {"added_tokens_decoder": {"7": {"special": True}}}},
        {"tokenizer_config": {}, "added_tokens": {"<x>": None}},
    ],
)
def test_what_describes_no_token_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "model", {}, files)
    with pytest.raises(TokenizerNotFound, match="added tokens"):
        TextService.load(str(tmp_path / "model"))
