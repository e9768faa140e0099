"""OpenAI's Responses API, on the path of chat completions."""
