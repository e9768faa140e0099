"""The OpenAI-compatible API: validates a request, plans what to run, and writes the answer."""
