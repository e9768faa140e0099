"""The tokenizer: byte-level BPE over the questions and glosses, with a ChatML template."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.build import phrasings
from models.build.wordnet import Entry

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
END_OF_TEXT_ID: Final = 0
IM_START_ID: Final = 1
IM_END_ID: Final = 2
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(entries: Sequence[Entry], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocab_size` tokens that holds all 256 bytes, and so gives back any text unchanged."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(entries), trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def _texts(entries: Sequence[Entry]) -> Iterator[str]:
    """Each gloss once, each word in a handful of its questions, and the fixed texts often enough to be merged."""
    for number, entry in enumerate(entries):
        yield entry.gloss
        templates = phrasings.trained_for(entry)
        for step in range(4):
            yield phrasings.fill(templates[(number * 4 + step) % len(templates)], entry)
    for _ in range(200):
        yield "system\nuser\nassistant\nQ: A:"
        yield from phrasings.SYSTEM_PROMPTS
        for question, answer in phrasings.SMALL_TALK:
            yield f"{question}\n{answer}"
