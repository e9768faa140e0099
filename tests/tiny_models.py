"""Small random models of several architectures, with a byte-level tokenizer, for tests.

Weights have a standard deviation of 0.08: large enough that context matters and that the two best tokens rarely tie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 320
EOS_TOKEN = "<|end|>"
REASONING_MARKERS = ("<think>", "</think>")
SLIDING_WINDOW = 24
_SPECIAL_TOKENS = (EOS_TOKEN, "<|user|>", "<|assistant|>", "<|system|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


def _config(config_class: Callable[..., PreTrainedConfig], **changes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: config_class(**{**_COMMON, **changes})


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config(LlamaConfig),
    "qwen2": _config(Qwen2Config),
    "qwen3": _config(Qwen3Config, num_hidden_layers=3),
    "wide-qwen3": _config(Qwen3Config, num_attention_heads=8, head_dim=128),
    "mistral": _config(MistralConfig, sliding_window=SLIDING_WINDOW, head_dim=64),
    "gemma": _config(GemmaConfig, num_key_value_heads=1),
    "gemma2": _config(
        Gemma2Config, sliding_window=SLIDING_WINDOW, query_pre_attn_scalar=48, attn_logit_softcapping=2.0
    ),
    "gemma3": _config(
        Gemma3TextConfig,
        sliding_window=SLIDING_WINDOW,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


DIVIDED: dict[str, Callable[[], PreTrainedConfig]] = {
    **ARCHITECTURES,
    "tied-llama": _config(LlamaConfig, vocab_size=319, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mixtral": _config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": _config(
        Qwen3MoeConfig, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0]
    ),
}
"""Models for tensor parallelism: also one whose vocabulary does not divide, with biases everywhere, and experts."""


def build_model(architecture: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a random model of `DIVIDED` and its tokenizer into `directory`, and returns it."""
    config = DIVIDED[architecture]()
    torch.manual_seed(seed)
    randomize(AutoModelForCausalLM.from_config(config, dtype=dtype)).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Draws all weights of a model anew, and returns it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms too: a weight that is one everywhere would hide that it is not applied.
            noise = torch.randn_like(parameter) * 0.08
            parameter.copy_(noise + parameter if "norm" in name else noise)
    return model


def add_reasoning(directory: Path) -> Path:
    """Gives a model of `build_model` tokens for reasoning, which its chat template opens, and returns `directory`."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(REASONING_MARKERS)})
    opened = "<|assistant|>{% if enable_thinking | default(true) %}<think>{% else %}<think></think>{% endif %}"
    tokenizer.chat_template = _CHAT_TEMPLATE.replace("<|assistant|>", opened)
    tokenizer.save_pretrained(directory)
    return directory


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a few special ones with a chat template."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, chat_template=_CHAT_TEMPLATE)
