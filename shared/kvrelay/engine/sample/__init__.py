"""Logits become tokens and log-probabilities."""
