"""Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings. Imports no torch."""
