"""Masks: which tokens grammars and the other limits of requests leave to each row of a step."""
