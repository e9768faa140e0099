"""Fields of chat completions that other APIs lack. Requests of those APIs may have them, with the same meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXTENSIONS = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "extra_key",
    "frequency_penalty",
    "guided_whitespace_pattern",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "speculation",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
)


def extension_fields(content: dict[str, Any], further: Sequence[str] = ()) -> dict[str, Any]:
    """Those fields of a body that are set, and `further` ones that only this API lacks."""
    return {name: content[name] for name in (*EXTENSIONS, *further) if content.get(name) is not None}
