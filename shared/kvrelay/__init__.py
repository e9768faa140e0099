"""LLM serving with prefill and decode taken apart: what the services share."""
