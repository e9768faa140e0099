"""The OpenAI-compatible HTTP API: parse, authenticate, validate, tokenize; then stream what dispatch brings."""
