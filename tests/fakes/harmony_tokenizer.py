"""A tokenizer with the markers of harmony (gpt-oss) and the names of its channels as single tokens, and a template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvrelay.text.output_parsing import harmony

RETURN_ID = 256
"""The end-of-sequence token of `tests.tiny_models`."""
SPECIAL = (harmony.RETURN, *(marker for marker in harmony.MARKERS if marker != harmony.RETURN))
# In an order in which no merge of one word takes letters from another.
WORDS = (harmony.ASSISTANT, harmony.ANALYSIS, harmony.COMMENTARY, harmony.FINAL)
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% if is_open %}<|channel|>analysis<|message|>{% endif %}"
    "{% endif %}"
)


def harmony_tokenizer() -> Tokenizer:
    """Of 300 tokens: bytes, markers, and the beginnings of the words."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in WORDS for end in range(1, len(word))))
    symbols += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({symbol: token_id for token_id, symbol in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in SPECIAL])
    return tokenizer


def write_harmony_tokenizer(folder: Path) -> Path:
    """Writes it as a model directory holds it, and returns the directory."""
    harmony_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": harmony.RETURN, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
