"""Guesses of the tokens that come next, from text that a worker has already, and tokens that are certain."""
