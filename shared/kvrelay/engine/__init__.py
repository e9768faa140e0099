"""Runs a model over a paged KV pool: loading, attention, sampling, and the step."""
