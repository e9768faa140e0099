"""Checkpoints whose weights are integers with scales: their formats, and reading them."""
