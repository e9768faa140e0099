"""A small tokenizer directory with a ChatML template, trained in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The otter is a playful animal that lives in rivers and eats fish.",
    "What is an otter? An otter is a mammal. Stop here, please. END of the story.",
    "Grüße aus München, naïve café, 東京 and 日本語, emoji 🦦🎉👩‍👩‍👧 and e\u0301 combining.",
]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}{{ raise_exception('tools are not for this model') }}{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges, so that most multi-byte characters are cut into several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like vocabulary: spaces as U+2581, unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581"]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return tokenizer


def write_text_model(folder: Path, template: str | None = CHATML) -> Path:
    """Writes the byte-level tokenizer as a model directory holds it."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    pad_token = {"__type": "AddedToken", "content": "<|endoftext|>", **flags}
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>", "pad_token": pad_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
