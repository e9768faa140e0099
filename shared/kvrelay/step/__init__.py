"""The plain types of a step: its inputs and its results."""
