"""Text in, tokens out, and back: tokenizer, chat template, incremental detokenizer, stop strings. Imports no torch."""
