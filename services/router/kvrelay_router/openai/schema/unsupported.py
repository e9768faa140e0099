"""Fields of OpenAI's and of neighbouring servers' APIs that would change the answer and are not supported.

They are refused by name, unless their value asks for nothing. Fields that are not listed here and not known are
ignored, as other servers do.
"""

from __future__ import annotations

from typing import Any

from kvrelay_router.http.api_error import ApiError

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")

COMMON: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    # Constraints on the output, as vLLM, SGLang and llama.cpp name them.
    "structured_outputs": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "guided_json_object": NOTHING,
    "structural_tag": NOTHING,
    "json_schema": NOTHING,
    "regex": NOTHING,
    "ebnf": NOTHING,
    "grammar": NOTHING,
    "stop_regex": NOTHING,
    # Ways to draw that are not here, and the values that switch them off.
    "typical_p": (None, 1),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "dynatemp_range": (None, 0),
    "repeat_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "n_predict": (None, -1),
    # Those of text-generation-webui and what took them over, which front ends send along with all others.
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
    "thinking_token_budget": (None,),
    # What the answer would be made of, or look like.
    "lora_path": NOTHING,
    "return_hidden_states": NOTHING,
    "return_tokens_as_token_ids": NOTHING,
    "logprob_token_ids": NOTHING,
    "logits_processors": NOTHING,
    "logit_processors": NOTHING,
    "bad_words": NOTHING,
    "allowed_token_ids": NOTHING,
    "prompt_embeds": NOTHING,
    "input_ids": NOTHING,
    "input_embeds": NOTHING,
    "session_params": NOTHING,
    "kv_transfer_params": NOTHING,
}

COMPLETION: dict[str, tuple[Any, ...]] = {**COMMON, "suffix": (None, "")}

CHAT: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "tool_choice": (None, "none", "auto"),
    "functions": NOTHING,
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": NOTHING,
    "web_search_options": (None,),
    "documents": NOTHING,
    "chat_template": NOTHING,
    "echo": NOTHING,
}


def refuse_unsupported(content: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> None:
    """Raises ApiError for the first field whose value asks for something that is not supported."""
    for name, value in content.items():
        if name in table and not _asks_for_nothing(value, table[name]):
            raise ApiError(
                f"The parameter '{name}' with this value is not supported",
                param=name,
                code="unsupported_parameter",
            )


def refuse_tools(content: dict[str, Any]) -> None:
    """Tools are only harmless while they are not to be used."""
    if content.get("tools") and content.get("tool_choice") != "none":
        raise ApiError(
            "Tool calls are not supported; leave 'tools' out or set 'tool_choice' to \"none\"",
            param="tools",
            code="unsupported_parameter",
        )


def _asks_for_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Equality that tells false from 0 and true from 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)
