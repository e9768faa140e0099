"""Masks: which tokens grammars, budgets for reasoning, allowed tokens and bad words leave to each row of a step."""
