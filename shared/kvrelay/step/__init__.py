"""The plain types of a step: what is computed, and what comes of it."""
