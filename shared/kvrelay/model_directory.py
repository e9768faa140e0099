"""What the files of a model's directory say, read without torch: what each file really is, the tokens that end an
output, the tokenizer that transformers makes of them, and its identity, by which a router and a worker notice that
theirs differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
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
_FILE_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_BUILT_MODELS = (
    *("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"),
    *("hyperclovax_vision_v2", "siglip2"),
)
"""Types of models for which transformers takes its own class of tokenizer, whichever one the files name."""
_BUILD = """
import sys
sys.modules["torch"] = None  # its import takes seconds, and tokenizers need none of it
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False).save_pretrained(sys.argv[2])
"""
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
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise ValueError("it names no files")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weight files: {error}") from None
    return shards


def cached_snapshot(name: str, cache: Path | None = None) -> Path | None:
    """The directory of a model of the hub in this machine's cache; None if it is not there. Raises ValueError for what
    is no name of the hub."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", cache_dir=cache)
    return Path(found).parent if isinstance(found, str) else None


def _files(directory: Path, *, needs_weights: bool) -> Iterator[Path]:
    """What has the name of a file that is read, also if it is a directory or a link to nothing."""
    present = sorted(directory.iterdir())
    for pattern in (*_OBJECTS, *_TEXTS):
        yield from (path for path in present if path.match(pattern))
    if not needs_weights:
        return
    index, (whole, pickled) = directory / INDEX, _WEIGHTS
    if directory / whole in present:
        yield directory / whole
    elif index in present:
        yield index
        yield from (path for name in weight_shards(index) if os.path.lexists(path := directory / name))
    else:
        yield from (path for path in present if path.match(pickled))


def _fault(path: Path) -> str | None:
    if not path.exists():
        return f"a link to a file that is not there: {_AGAIN}, or copy it with `cp -L`"
    if path.is_dir():
        return "a directory, and should be a file"
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
        case ".bin" if not start.startswith((b"PK", b"\x80")):
            return f"not of the format of torch, though its name says so: {_AGAIN}"
        case ".bin" if start.startswith(b"PK") and not zipfile.is_zipfile(path):
            return f"cut off after {num_bytes} bytes: {_AGAIN}"
    return None


def _fault_of_json(path: Path) -> str | None:
    content = path.read_bytes().strip()
    if not content:
        return f"empty: {_AGAIN}"
    try:
        found = json.loads(content)
    except ValueError as error:
        return f"not valid JSON, perhaps cut off: {error}"
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
    if "eos_token" not in named:
        named = _built_config(directory)  # the class may have one
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


def _built_config(directory: Path) -> dict[str, Any]:
    """The configuration of the tokenizer that transformers builds; empty if it takes the one of `tokenizer.json`."""
    if not (directory / "tokenizer.json").is_file() or is_taken_from_file(directory):
        return {}
    with tempfile.TemporaryDirectory(prefix="kvrelay-tokenizer-") as built:
        try:
            build_tokenizer(directory, Path(built))
        except ValueError:
            return {}  # the router, which cannot build it either, reports that
        return _read_object(Path(built) / "tokenizer_config.json")


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


# -- the tokenizer of transformers ------------------------------------------------------------------------------------


def is_taken_from_file(directory: Path) -> bool:
    """Returns whether transformers takes a tokenizer from `tokenizer.json` as it stands there. For the classes of
    particular models (`LlamaTokenizer`) it takes only vocabulary, merges and post-processor from the file, and builds
    normalizer, pre-tokenizer and decoder by the class. False if it may do that. Raises ValueError for files that cannot
    be read."""
    stated = _read_object(directory / "tokenizer_config.json")
    return (
        stated.get("tokenizer_class") in _FILE_CLASSES
        and _read_object(directory / "config.json").get("model_type") not in _BUILT_MODELS
        and not stated.get("fix_mistral_regex")
    )


def build_tokenizer(directory: Path, target: Path) -> None:
    """Writes the tokenizer that transformers makes of a directory's files to `target`, in a process of its own: the
    import takes a second, and a router has no other use for it. Raises ValueError with the reason if there is none."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(directory), str(target)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode != 0 or not (target / "tokenizer.json").is_file():
        reason = done.stderr.strip().splitlines()[-1:] or ["it has no fast form"]
        raise ValueError(reason[0])


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
