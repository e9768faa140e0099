"""Reads a model: its configuration, weights, identity, and a check that paged attention computes what it does."""
