"""Blocks for sequences: admission, growth, copy-on-write, swapping, preemption."""
