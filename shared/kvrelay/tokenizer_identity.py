"""Identifies a tokenizer by what its token ids mean, so that a router and a worker notice that theirs differ."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def identity_of_file(path: Path) -> str:
    """The identity of a `tokenizer.json`; empty if there is none or it cannot be read."""
    try:
        return identity_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def identity_of(tokenizer_json: str) -> str:
    """16 hex digits over vocabulary, merges and added tokens; empty if the text has no vocabulary.

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
