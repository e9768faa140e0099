"""The facts of a model that a simulated device needs, read without weights: vocabulary, length, identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.simulated.token_hash import Vocabulary


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`max_model_len` is None if the configuration has none. `identity` hashes configuration and tokenizer."""

    vocabulary: Vocabulary
    max_model_len: int | None
    identity: bytes


@lru_cache(maxsize=4)
def read_facts(model: str) -> ModelFacts:
    """Reads a directory or a hub name, of which it downloads only small files.

    Raises OSError if there is no such model, ValueError if its files are invalid.
    """
    files = {name: _read(model, name) for name in ("config.json", "generation_config.json", "tokenizer.json")}
    try:
        config, generation, tokenizer = (json.loads(content) if content else {} for content in files.values())
        text = config.get("text_config") or config
        return ModelFacts(
            _vocabulary(int(text["vocab_size"]), _eos_ids(generation, text), tokenizer),
            text.get("max_position_embeddings"),
            hashlib.blake2b(files["config.json"] + files["tokenizer.json"], digest_size=16).digest(),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the files of {model} are not a model's: {type(error).__name__}: {error}") from error


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids = next((config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None), ())
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _vocabulary(size: int, eos_ids: tuple[int, ...], tokenizer: dict[str, Any]) -> Vocabulary:
    special = {entry["id"] for entry in tokenizer.get("added_tokens") or () if entry.get("special")}
    regular = np.setdiff1d(np.arange(size), np.array(sorted(special | set(eos_ids)), np.int64))
    if not regular.size:
        raise ValueError(f"no text in a vocabulary of {size}")
    return Vocabulary(size, regular, eos_ids)


def _read(model: str, name: str) -> bytes:
    """Reads a file; empty if an optional file is missing."""
    directory = Path(model).expanduser()
    if not directory.is_dir():
        directory = _fetched(model)
    path = directory / name
    return path.read_bytes() if name == "config.json" or path.is_file() else b""


def _fetched(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=["*config.json", "tokenizer.json"]))
    except HFValidationError as error:
        raise OSError(f"{model} is neither a directory nor a name on the hub") from error
