"""Beam search: the search itself, and the sequences of a search."""
