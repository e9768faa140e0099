"""Pydantic models of the request bodies, and their validation."""
