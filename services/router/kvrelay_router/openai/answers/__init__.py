"""The formats of answers: choices, log-probabilities, chat and text completions, whole or as events."""
