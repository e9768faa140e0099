"""Texts are tokenized as by transformers, which builds the tokenizers of most classes itself, over generated models."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

from kvrelay import model_directory
from kvrelay.model_directory import end_token_ids, is_taken_from_file
from kvrelay.text import tokenizer_files
from kvrelay.text.service import TextService
from kvrelay.text.tokenizer import make_detokenizer
from kvrelay.text.tokenizer_files import load_source
from tests.thoroughness import examples

WORDS = ["user", "otter", "hello", "the", "12", "\u00e9t\u00e9"]
CONTROL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool>"]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
CLASSES = [
    *("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "GemmaTokenizerFast"),
    *("Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "GPTNeoXTokenizerFast", "CohereTokenizerFast"),
    *("PreTrainedTokenizerFast", "TokenizersBackend", "BloomTokenizerFast", "OfNoVersionTokenizer", None),
]
MODEL_TYPES = ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "cohere", "mistral", "phi3", "granite", None]
NORMALIZERS: dict[str, Callable[[], Any]] = {
    "llama 2": lambda: normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    "gemma": lambda: normalizers.Replace(" ", "\u2581"),
    "none for pieces": lambda: None,
    "none": lambda: None,
    "nfc": normalizers.NFC,
    "lower": normalizers.Lowercase,
}
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "metaspace": lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "metaspace always": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bytes behind a space": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def bpe(pieces: list[str], words: list[str], **options: Any) -> models.BPE:
    """A vocabulary of these pieces, and merges that join each word from its left end."""
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab.setdefault(word[:end], len(vocab))
    return models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), **options)


def byte_level() -> Tokenizer:
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [spelled.pre_tokenize_str(text)[0][0] for word in WORDS for text in (word, f" {word}")]
    tokenizer = Tokenizer(bpe([*CONTROL[:3], *sorted(pre_tokenizers.ByteLevel.alphabet())], words))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    characters = sorted({*"".join(WORDS), *map(chr, range(0x21, 0x7F)), "\u2581"})
    pieces = [*CONTROL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    words = [*(f"\u2581{word}" for word in WORDS), *WORDS]
    tokenizer = Tokenizer(bpe(pieces, words, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def write(folder: Path, rng: random.Random) -> None:
    """A model's tokenizer files with a class, a pipeline and flags, of which any may contradict each other."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    make = rng.choice([byte_level, sentence_pieces])
    tokenizer = make()
    normalizer = NORMALIZERS[rng.choice(list(NORMALIZERS)[3 * (make is byte_level) :])]()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if (pre_tokenizer := PRE_TOKENIZERS[rng.choice(list(PRE_TOKENIZERS))]()) is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    added = rng.sample(CONTROL, rng.randint(0, len(CONTROL)))
    tokenizer.add_tokens([AddedToken(text, **flags(rng)) for text in added])
    if rng.random() < 0.4 and tokenizer.token_to_id("<s>") is not None:
        special = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))

    stated: dict[str, Any] = {"tokenizer_class": rng.choice(CLASSES)}
    stated |= rng.choice([{}, {"legacy": rng.choice([True, False, None])}])
    stated |= rng.choice([{}, {"add_prefix_space": rng.choice([True, False, None])}])
    stated |= rng.choice([{}, {"add_bos_token": rng.random() < 0.5, "add_eos_token": rng.random() < 0.3}])
    stated |= rng.choice([{}, {"unk_token": "<unk>"}])  # any other would be in no vocabulary
    for name in rng.sample(["bos_token", "eos_token", "pad_token", "image_token"], rng.randint(0, 4)):
        stated[name] = rng.choice([*CONTROL, {"__type": "AddedToken", "content": rng.choice(CONTROL), **flags(rng)}])
    stated |= rng.choice([{}, {"additional_special_tokens": rng.sample(CONTROL, 2)}])
    if rng.random() < 0.5:
        listed = tokenizer.get_added_tokens_decoder().items()
        stated["added_tokens_decoder"] = {str(number): described(token) for number, token in listed}
    tokens = [name for name in stated if name.endswith("_token") and not name.startswith("add_")]
    named = {name: stated.pop(name) for name in tokens if rng.random() < 0.3}
    if named:
        (folder / "special_tokens_map.json").write_text(json.dumps(named))
    if stated["tokenizer_class"] is None:
        del stated["tokenizer_class"]
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    if (model_type := rng.choice(MODEL_TYPES)) is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def flags(rng: random.Random) -> dict[str, bool]:
    return {name: rng.random() < 0.3 for name in FLAGS}


def described(token: AddedToken) -> dict[str, Any]:
    return {"content": token.content, **{name: getattr(token, name) for name in FLAGS}}


def text_of(rng: random.Random) -> str:
    parts = [*WORDS, *CONTROL, " ", "  ", "\n", "\u6771\u4eac", "e\u0301", "\U0001f9a6", "'ll", "Az 3.5", "\u2581"]
    return "".join(rng.choices(parts, k=rng.randint(1, 12)))


def build_here(directory: Path, target: Path) -> None:
    """What the process of its own does, without its second for the imports."""
    try:
        AutoTokenizer.from_pretrained(directory, trust_remote_code=False).save_pretrained(target)
    except Exception as error:
        raise ValueError(str(error)) from error


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_directory, "build_tokenizer", build_here)
    monkeypatch.setattr(tokenizer_files, "build_tokenizer", build_here)


@pytest.mark.usefixtures("built_here")
@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    write(tmp_path / "model", rng)
    try:
        theirs = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=False)
    except Exception:  # it raises many kinds for files that contradict each other
        theirs = None
    source, service = load_source(str(tmp_path / "model")), TextService.load(str(tmp_path / "model"))
    service.close()
    ours = service.tokenizer
    if theirs is None:
        file = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
        assert json.loads(source.tokenizer_json) == json.loads(file.to_str())
        return
    assert source.added_tokens.texts() == theirs.special_tokens_map
    for text in (text_of(rng) for _ in range(6)):
        adds = rng.random() < 0.5
        ids = theirs(text, add_special_tokens=adds)["input_ids"]
        assert ours.encode(text, add_special_tokens=adds) == ids, text
        skips = rng.random() < 0.5
        shown = theirs.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skips) == shown
        detokenizer = make_detokenizer(ours, [], skip_special_tokens=skips)
        assert "".join([*(detokenizer.feed([each]) for each in ids), detokenizer.flush()]) == shown
    eos = theirs.eos_token_id
    if eos is not None and eos < Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).get_vocab_size():
        assert eos in end_token_ids(tmp_path / "model")


def llama(folder: Path, **stated: Any) -> Path:
    tokenizer = sentence_pieces()
    tokenizer.normalizer = NORMALIZERS["llama 2"]()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **stated}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_a_class_that_transformers_builds_is_built_in_a_process_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = TextService.load(str(llama(tmp_path)))
    service.close()
    ids = service.tokenizer.encode("<|im_start|>user", add_special_tokens=False)
    assert [service.tokenizer.token_string(each) for each in ids] == ["<|im_start|>", "user"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "normalizer and pre_tokenizer" in record.getMessage()
    assert end_token_ids(tmp_path) == (1,), "that of the class"


def test_what_transformers_cannot_build_is_taken_from_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto_map = {"AutoTokenizer": ["custom.Slow", "custom.Fast"]}
    service = TextService.load(str(llama(tmp_path, tokenizer_class="CustomTokenizer", auto_map=auto_map)))
    service.close()
    ids = service.tokenizer.encode("<|im_start|>user", add_special_tokens=False)
    assert [service.tokenizer.token_string(each) for each in ids] == ["<|im_start|>", "\u2581user"]
    assert "transformers makes no tokenizer" in caplog.text


@pytest.mark.parametrize("model_type", sorted(MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS))
def test_models_whose_class_transformers_chooses_itself_are_known(model_type: str, tmp_path: Path) -> None:
    llama(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert not is_taken_from_file(tmp_path) or type(theirs).__name__ == "TokenizersBackend"
