"""Scheduling policies: the contents of a step, the cutting of prompts, and policies by name."""
