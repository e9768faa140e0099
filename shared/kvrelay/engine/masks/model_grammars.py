"""Compiles grammars for a loaded model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoTokenizer

from kvrelay.engine.load.model_files import find_model_dir
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError


def make_grammar_compiler(name: str, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """The compiler for the model in directory `name`, or of the hub name `name` in the local cache.

    Takes up to seconds for a large vocabulary. Raises GrammarError if there is no tokenizer that it can read.
    """
    from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler  # most workers never need it

    return LLGuidanceCompiler(_tokenizer_json(name), vocab_size, eos_token_ids)


def _tokenizer_json(name: str) -> str:
    directory = find_model_dir(name)
    file = directory / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str())
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise GrammarError(f"grammars cannot be compiled for the tokenizer of {name}: {error}") from None
