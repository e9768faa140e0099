"""Compiles grammars, and follows output tokens through them. Without torch: the router checks requests with it."""
