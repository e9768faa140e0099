"""Fields beyond the models of requests: of OpenAI's and other servers' APIs that are not supported and would change the
answer, and of chat completions that other APIs lack.

A request with such a field is refused, unless its value is listed here as harmless. Other unknown fields are ignored,
as in other servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.text.request.api_error import ApiError

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")

COMMON: dict[str, tuple[Any, ...]] = {
    "grammar": NOTHING,  # of llama.cpp's server
    "stop_regex": NOTHING,
    # Other sampling methods, and the values that switch them off.
    "typical_p": (None, 1),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "dynatemp_range": (None, 0),
    "repeat_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "n_predict": (None, -1),
    # Sampling methods of text-generation-webui, which many front ends send with every request.
    "top_n_sigma": (None, -1, 0),
    "top_a": (None, 0),
    "tfs": (None, 1),
    "tfs_z": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "smoothing_factor": (None, 0),
    "dynamic_temperature": (None, False),
    "mirostat_mode": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1),
    "negative_prompt": NOTHING,
    "ban_eos_token": (None, False),
    "custom_token_bans": NOTHING,
    "banned_strings": NOTHING,
    "grammar_string": NOTHING,
    "custom_logit_processor": NOTHING,
    # Fields that change the model, the prompt or the form of the answer.
    "lora_path": NOTHING,
    "return_hidden_states": NOTHING,
    "logits_processors": NOTHING,
    "logit_processors": NOTHING,
    "prompt_embeds": NOTHING,
    "input_ids": NOTHING,
    "input_embeds": NOTHING,
    "session_params": NOTHING,
    "kv_transfer_params": NOTHING,
    "packed_top_logprobs": NOTHING,
    "repetition_detection": NOTHING,
    "return_routed_experts": NOTHING,
    "watermarking": NOTHING,
}

COMPLETION: dict[str, tuple[Any, ...]] = {**COMMON, "thinking_token_budget": (None, -1)}

CHAT: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "functions": NOTHING,
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": NOTHING,
    "web_search_options": (None,),
    "documents": NOTHING,
    "chat_template": NOTHING,
}


def refuse_unsupported(content: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> None:
    """Raises ApiError for the first field with a value that is not harmless."""
    for name, value in content.items():
        if name in table and not _is_harmless(value, table[name]):
            raise ApiError(
                f"The parameter '{name}' with this value is not supported",
                param=name,
                code="unsupported_parameter",
            )


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Compares with each harmless value, and distinguishes false from 0 and true from 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


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
"""Requests of APIs that lack these fields may have them, with the same meaning."""


def extension_fields(content: dict[str, Any], further: Sequence[str] = ()) -> dict[str, Any]:
    """Those fields of a body that are set, and `further` ones that only this API lacks."""
    return {name: content[name] for name in (*EXTENSIONS, *further) if content.get(name) is not None}
