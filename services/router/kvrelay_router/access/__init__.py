"""Who may send requests and how many: API keys, request ids, rate limits."""
