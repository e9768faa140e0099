"""Blocks for sequences: who holds which, and what is copied where."""
