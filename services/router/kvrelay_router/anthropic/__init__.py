"""Anthropic's Messages API, on the path of chat completions."""
