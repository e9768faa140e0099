"""What the files of a model's directory say, read without torch: what each file really is, the tokens that end an
output, and the tokenizer's identity, by which a router and a worker notice that theirs differ.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "chat_template.json"),
)
_TEXTS = ("merges.txt", "vocab.txt", "*.model", "*.tiktoken", "*.jinja")
_WEIGHTS = ("model.safetensors", "pytorch_model*.bin")
_AGAIN = "download it again"
_KINDS = (
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, which stands for the file: run `git lfs pull` in its directory",
    ),
    (b"# xet version", "a pointer of Xet, which stands for the file: fetch the file with `hf download`"),
    (b"/annex/objects/", "a pointer of git-annex, which stands for the file: run `git annex get` in its directory"),
    (b"<!doctype html", f"a page of HTML, perhaps of an error or a login: {_AGAIN}"),
    (b"<html", f"a page of HTML, perhaps of an error or a login: {_AGAIN}"),
    (b"<?xml", f"an XML document, perhaps an error of a file store: {_AGAIN}"),
)
_OTHER_WEIGHTS = (
    (b"PK\x03\x04", "a zip archive, perhaps weights saved by torch: they are read from pytorch_model.bin"),
    (b"GGUF", "of the format GGUF, which is not read"),
    (b"\x1f\x8b", "compressed by gzip: unpack it"),
)
_START_BYTES = 1024
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def wrong_file(directory: Path, *, needs_weights: bool) -> str | None:
    """Says of the first file that is not what its name says what it is and what to do, or returns None. Large files are
    not read whole, and missing ones are no fault. Raises ValueError for an index without a map of weight files."""
    for path in _files(directory, needs_weights=needs_weights):
        try:
            fault = _fault(path)
        except OSError as error:
            fault = f"unreadable: {error.strerror or error}"
        if fault is not None:
            return f"{path} is {fault}"
    return None


def weight_shards(index: Path) -> list[str]:
    """The weight files of an index. Raises ValueError if it is none, OSError if it cannot be read."""
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weight files: {error}") from None


def _files(directory: Path, *, needs_weights: bool) -> Iterator[Path]:
    for pattern in (*_OBJECTS, *_TEXTS):
        yield from (path for path in sorted(directory.glob(pattern)) if path.is_file())
    if not needs_weights:
        return
    index, (whole, pickled) = directory / INDEX, _WEIGHTS
    if (directory / whole).is_file():
        yield directory / whole
    elif index.is_file():
        yield index
        yield from (path for name in weight_shards(index) if (path := directory / name).is_file())
    else:
        yield from sorted(directory.glob(pickled))


def _fault(path: Path) -> str | None:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
    written = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for sign, kind in _KINDS:
        if written.startswith(sign):
            return kind
    match path.suffix:
        case ".json":
            return _fault_of_json(path)
        case ".safetensors":
            return _fault_of_safetensors(path, start, num_bytes)
        case ".bin" if not num_bytes:
            return f"empty: {_AGAIN}"
        case ".bin" if start.startswith(b"PK") and not zipfile.is_zipfile(path):
            return f"cut off after {num_bytes} bytes: {_AGAIN}"
    return None


def _fault_of_json(path: Path) -> str | None:
    content = path.read_bytes().strip()
    if not content:
        return f"empty: {_AGAIN}"
    # A tokenizer of tens of megabytes is parsed by its library, which knows more.
    if path.name == "tokenizer.json":
        return None if content[:1] + content[-1:] == b"{}" else f"not valid JSON, perhaps cut off: {_AGAIN}"
    try:
        found = json.loads(content)
    except ValueError as error:
        return f"not valid JSON: {error}"
    return None if isinstance(found, dict) else "not what it should be: it holds no JSON object"


def _fault_of_safetensors(path: Path, start: bytes, num_bytes: int) -> str | None:
    if not num_bytes:
        return f"empty: {_AGAIN}"
    for sign, kind in _OTHER_WEIGHTS:
        if start.startswith(sign):
            return kind
    num_header = int.from_bytes(start[:8], "little")
    if num_bytes < 8 or num_header > _MAX_HEADER_BYTES or start[8:9] not in (b"{", b""):
        return f"not of the format safetensors, though its name says so: {_AGAIN}"
    end = 8 + num_header
    if end <= num_bytes:
        with path.open("rb") as file:
            file.seek(8)
            header = file.read(num_header)
        try:
            tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            end += max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return f"not of the format safetensors: its header cannot be read: {error}"
    if end != num_bytes:
        how = "cut off" if num_bytes < end else "too long"
        return f"{how}: its header says at least {end} bytes, and it has {num_bytes}: {_AGAIN}"
    return None


# -- end tokens -------------------------------------------------------------------------------------------------------


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end an output, as in vLLM and SGLang: those of `generation_config.json`, of `config.json`, and
    the tokenizer's `eos_token`, which fine-tunes with a chat format often name alone. Ids may be beyond the
    vocabulary. Raises ValueError for files that cannot be read."""
    config = _read_object(directory / "config.json")
    ids: list[Any] = []
    for each in (_read_object(directory / "generation_config.json"), config, config.get("text_config")):
        stated = each.get("eos_token_id") if isinstance(each, dict) else None
        ids += stated if isinstance(stated, list) else [stated]
    try:
        ids.append(_end_of_tokenizer(directory))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the tokens of {directory / 'tokenizer.json'} cannot be read: {error}") from None
    return tuple(dict.fromkeys(each for each in ids if isinstance(each, int) and not isinstance(each, bool)))


def _end_of_tokenizer(directory: Path) -> int | None:
    config = _read_object(directory / "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder")
    # As in transformers, older files count only if the config does not list all added tokens.
    named = config if decoder is not None else {**config, **_read_object(directory / "special_tokens_map.json")}
    text = token_text(named.get("eos_token"))
    if not text:
        return None
    tokenizer = _read_object(directory / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or ():
        if entry["content"] == text:
            return int(entry["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of Unigram: pairs of a text and its score
        vocabulary = {pair[0]: index for index, pair in enumerate(vocabulary)}
    listed = {token_text(entry): token_id for token_id, entry in (decoder or {}).items()}
    for ids in (vocabulary, listed, _read_object(directory / "added_tokens.json")):
        if text in ids:
            return int(ids[text])
    return None


def token_text(value: Any) -> str | None:
    """The text of a token, which files give as a string or as an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none. Raises ValueError if it holds no object."""
    return object_in(path, path.read_bytes()) if path.is_file() else {}


def object_in(path: Path, text: str | bytes) -> dict[str, Any]:
    """The JSON object that is the content of a file. Raises ValueError if it is none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


# -- the tokenizer's identity -----------------------------------------------------------------------------------------


def identity_of_file(path: Path) -> str:
    """The identity of a `tokenizer.json`; empty if there is none or it cannot be read."""
    try:
        return identity_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def identity_of(tokenizer_json: str) -> str:
    """What the token ids of a tokenizer mean: 16 hex digits over vocabulary, merges and added tokens; empty if the text
    has no vocabulary.

    Whitespace, truncation, padding and the form of the merges differ among versions of the library and do not count.
    """
    try:
        content = json.loads(tokenizer_json)
        model = content["model"]
        added = [(token["id"], token["content"]) for token in content.get("added_tokens", [])]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
        meant = [model["vocab"], merges, sorted(added)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return hashlib.blake2b(json.dumps(meant, sort_keys=True).encode(), digest_size=8).hexdigest()
