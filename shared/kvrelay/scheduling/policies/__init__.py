"""Scheduling policies: what goes into a step, how prompts are cut, and policies by name."""
