"""Makes a model with random weights and a byte-level BPE tokenizer, for comparisons of speed.

    python -m benchmarks.peers.make_model DIR --shape small

`small`: 41.6 million parameters. `qwen3-0.6b`: the layers of Qwen3-0.6B with a vocabulary of 32,000 (473 million).
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCAB_SIZE = 32_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def make_tokenizer(vocab_size: int) -> Any:
    """Trained on the sources of Python's standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.chat_template = CHAT_TEMPLATE
    return made


def make_config(shape: str, vocab_size: int) -> Any:
    """The configuration of a model of one of `SHAPES`."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **SHAPES[shape],
    )


def make_model(shape: str, vocab_size: int) -> Any:
    """Returns a model in bfloat16. Each call makes the same weights."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(make_config(shape, vocab_size))
    model = model.to(dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def _texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    given = parser.parse_args()
    make_tokenizer(VOCAB_SIZE).save_pretrained(given.folder)
    model = make_model(given.shape, VOCAB_SIZE)
    model.save_pretrained(given.folder)
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million parameters in {given.folder}")


if __name__ == "__main__":
    main()
